"""Torch modules as sources and sinks: ties, buffers, casts, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.cuda.copies import _copy_by_torch
from rlmesh.weights.cuda.devices import reference, sum_by_torch
from rlmesh.weights.module_sink import ModuleSink
from rlmesh.weights.module_source import ModuleSource
from rlmesh.weights.module_tensors import plain_name
from rlmesh.weights.planning.plan import Mode
from tests.own_time import HANG_S
from tests.weights.mesh import WeightMesh

MODES: list[Mode] = ["double_buffer", "in_place"]


class Model(nn.Module):
    """Embedding and head that may be tied, a transposed weight, an empty one, and buffers of both kinds."""

    def __init__(
        self, seed: int, *, tied: bool = True, extra: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.across = nn.Parameter(torch.randn(6, 4).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.randn(()))
        self.mean: torch.Tensor
        self.cache: torch.Tensor
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        if extra:
            self.extra = nn.Parameter(torch.zeros(2))
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight


def synced(mesh: WeightMesh, source: nn.Module, sink: nn.Module, mode: Mode, **options: object) -> None:
    mesh.add_sink(ModuleSink(sink, mode), 0)
    mesh.sync(ModuleSource(source), bucket_bytes=512, **options).push(1).result(HANG_S)


@pytest.mark.case("O18")
@pytest.mark.parametrize("mode", MODES)
def test_values_ties_layouts_and_buffers_arrive(mesh: WeightMesh, mode: Mode) -> None:
    source, sink = Model(1), Model(2)
    parameter, cache = sink.embed.weight, sink.cache.clone()
    synced(mesh, source, sink, mode)
    assert sink.head.weight is sink.embed.weight is parameter, "still tied, still the same parameter"
    assert len(mesh.syncs[0].plan().buckets) > 1
    wanted, got = source.state_dict(), sink.state_dict()
    assert wanted.keys() == got.keys()
    for name in wanted:
        assert torch.equal(wanted[name], got[name]), name
    assert torch.equal(sink.cache, cache) and "not synced: cache" in str(mesh.syncs[0].plan())
    with torch.no_grad():
        sink.embed.weight.add_(1)
        assert torch.equal(sink.head.weight, sink.embed.weight)
        assert torch.equal(source.embed.weight + 1, sink.embed.weight), "the source's memory is not the sink's"


@pytest.mark.case("O18")
def test_names_that_do_not_fit_are_refused_and_named(mesh: WeightMesh) -> None:
    more = mesh.add_sink(ModuleSink(Model(2, extra=True)), 0)
    with pytest.raises(WeightSyncError, match="ROLLOUT:0: the source has no extra, which the sink needs"):
        mesh.sync(ModuleSource(Model(1))).push(1)
    assert more.weights.version is None
    with pytest.raises(WeightSyncError, match="ROLLOUT:0: the sink has no across, which the source has"):
        mesh.restart_sink(ModuleSink(Model(2), exclude=["across"]), 0)
        mesh.sync(ModuleSource(Model(1))).push(1)


@pytest.mark.case("O18")
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_cast_only_where_that_is_allowed(mesh: WeightMesh, mode: Mode) -> None:
    source, sink = Model(1), Model(2, dtype=torch.bfloat16)
    with pytest.raises(WeightSyncError, match="the source has float32, the sink bfloat16; allow it with allow_cast"):
        synced(mesh, source, sink, mode)
    mesh.sync(ModuleSource(source), allow_cast={"float32": "bfloat16"}).push(1).result(HANG_S)
    for name, value in source.state_dict().items():
        assert torch.equal(value.to(torch.bfloat16), sink.state_dict()[name])


def test_sinks_of_several_types_each_get_their_own(mesh: WeightMesh) -> None:
    source, same, half = Model(1), Model(2), Model(3, dtype=torch.float16)
    mesh.add_sink(ModuleSink(same), 1)
    synced(mesh, source, half, "double_buffer", allow_cast=True)
    for name, value in source.state_dict().items():
        assert torch.equal(value, same.state_dict()[name])
        assert torch.equal(value.half(), half.state_dict()[name])


def test_a_tie_of_the_source_fills_two_tensors_of_the_sink(mesh: WeightMesh) -> None:
    source, sink = Model(1), Model(2, tied=False)
    synced(mesh, source, sink, "double_buffer")
    assert torch.equal(sink.head.weight, source.head.weight) and torch.equal(sink.embed.weight, source.head.weight)
    with pytest.raises(WeightSyncError, match=r"tied to embed.weight at the sink, but the source has two tensors"):
        mesh.restart_sink(ModuleSink(Model(2)), 0)
        mesh.sync(ModuleSource(Model(1, tied=False))).push(1)


def test_an_optimizer_step_during_a_fenced_push_fails_it(mesh: WeightMesh) -> None:
    source, sink = Model(1), Model(2)
    before = sink.across.clone()

    def step(name: str, bucket: int) -> None:
        if name == "staged" and bucket == 0:
            with torch.no_grad():
                source.across.add_(1)

    member = mesh.add_sink(ModuleSink(sink), 0, tap=step)
    with pytest.raises(WeightSyncError, match="the weights were changed before all sinks had them"):
        mesh.sync(ModuleSource(source), bucket_bytes=256).push(1).result(HANG_S)
    assert member.weights.version is None and torch.equal(sink.across, before)


def test_rollback_is_the_version_before(mesh: WeightMesh) -> None:
    source, sink = Model(1), Model(2)
    member = mesh.add_sink(ModuleSink(sink), 0)
    sync = mesh.sync(ModuleSource(source))
    sync.push(1).result(HANG_S)
    first = sink.across.clone()
    with torch.no_grad():
        source.across.add_(1)
    sync.push(2).result(HANG_S)
    assert torch.equal(sink.across, first + 1)
    assert sync.rollback() == 1 and member.weights.version == 1 and torch.equal(sink.across, first)
    with pytest.raises(WeightSyncError, match="there is no earlier version to go back to"):
        sync.rollback()
    sync.push(3).result(HANG_S)
    assert torch.equal(sink.across, first + 1)


def test_names_of_wrappers_are_taken_off() -> None:
    assert plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
    with pytest.raises(UsageError, match=r"exclude: the module has no \['nothing'\]"):
        ModuleSource(Model(1), exclude=["nothing"])
    with torch.device("meta"), pytest.raises(WeightSyncError, match="has no memory yet"):
        ModuleSource(nn.Linear(2, 2))


def test_a_source_gives_what_was_asked_for_and_nothing_else() -> None:
    module = Model(1)
    source = ModuleSource(module)
    names = [spec.name for spec in source.manifest()]
    for some in (names, names[:2], names[1:], names[:1], []):
        with source.gather(some) as tensors:
            assert list(tensors) == some
            assert all(tensor is module.get_parameter(name) for name, tensor in tensors.items() if "mean" not in name)


@pytest.mark.parametrize("size", [0, 1, 8, 8 * 4096 - 1, 8 * 4096, 3 * 8 * 4096 + 13])
def test_torch_sums_as_the_definition_says(size: int) -> None:
    piece = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)[3:]
    target = torch.zeros(size + 5, dtype=torch.uint8)
    assert sum_by_torch(piece) == reference(bytes(piece.tolist()))
    assert _copy_by_torch([piece], [target], [5], True) == [sum_by_torch(piece)] and torch.equal(piece, target[5:])
    assert _copy_by_torch([piece], None, None, True) == [sum_by_torch(piece)]
    assert _copy_by_torch([piece], None, None, False) == []
