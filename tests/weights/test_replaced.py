"""Case b11: parameters that were replaced since the weights were offered. A push brings what the module has now, or
refuses; and so it is at the sink. Case a14: weights that change while a snapshot of them is taken."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlmesh.errors import WeightSyncError
from rlmesh.weights.arrays import ArraySink, ArraySource
from rlmesh.weights.module_sink import ModuleSink
from rlmesh.weights.module_source import ModuleSource
from rlmesh.weights.planning.plan import Mode
from tests.own_time import HANG_S
from tests.weights.mesh import WeightMesh, arrays

MODES: list[Mode] = ["double_buffer", "in_place"]


class Net(nn.Module):
    """Two layers, a persistent buffer, and a mask that each forward pass makes anew."""

    def __init__(self, seed: int, *, vocabulary: int = 6, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, 4)
        self.head = nn.Linear(4, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.scale: Tensor
        self.mask: Tensor
        self.register_buffer("scale", torch.full((3,), float(seed)))
        self.register_buffer("mask", torch.ones(1), persistent=False)


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def assigned(model: Net) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)


def new_parameter(model: Net) -> None:
    model.embed.weight = nn.Parameter(torch.full((6, 4), 7.0))


def new_layer(model: Net) -> None:
    model.head = nn.Linear(4, 6, bias=False)


def new_memory(model: Net) -> None:
    model.embed.weight.data = torch.full((6, 4), 5.0)


def new_buffer(model: Net) -> None:
    model.scale = torch.full((3,), 9.0)


def there_and_back(model: Net) -> None:
    model.double().float()


def only_a_mask(model: Net) -> None:
    model.mask = torch.zeros(1)
    with torch.no_grad():
        model.head.weight += 1


REPLACED: list[Callable[[Net], None]] = [
    assigned, new_parameter, new_layer, new_memory, new_buffer, there_and_back, only_a_mask
]  # fmt: skip


@pytest.mark.case("b11")
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(
    ("replace", "channel"),
    [*((replace, "shm") for replace in REPLACED), (assigned, "stream"), (assigned, "collective")],
)
def test_a_push_brings_what_the_module_has_now(
    mesh: WeightMesh, replace: Callable[[Net], None], snapshot: bool, channel: str
) -> None:
    source, sink = Net(1), Net(2)
    mesh.add_source(ModuleSource(source))
    mesh.add_sink(ModuleSink(sink), 0)
    sync = mesh.sync(snapshot=snapshot, channel=channel, bucket_bytes=64)
    sync.push(1).result(HANG_S)
    for version in (2, 3):
        replace(source)
        sync.push(version).result(HANG_S)
        assert same(source, sink)


@pytest.mark.case("b11")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    ("replace", "told", "fits"),
    [
        (lambda model: model.half(), r"embed.weight \[6, 4\] float16, not embed.weight \[6, 4\] float32", False),
        (lambda model: setattr(model, "embed", nn.Embedding(8, 4)), r"embed.weight \[8, 4\]", False),
        (lambda model: setattr(model.head, "weight", model.embed.weight), "head.weight .*tied to embed.weight", True),
        (lambda model: setattr(model, "more", nn.Linear(1, 1)), r"more.weight \[1, 1\] float32, not None", False),
        (lambda model: delattr(model, "head"), "no head.weight", False),
    ],
)
def test_another_form_is_refused_and_planned_anew(
    mesh: WeightMesh, replace: Callable[[Net], object], told: str, fits: bool, local: bool
) -> None:
    """A source of the caller's is planned anew in the push itself; a role's by the next push."""
    source, sink = Net(1), Net(2)
    offered = ModuleSource(source)
    if not local:
        mesh.add_source(offered)
    member = mesh.add_sink(ModuleSink(sink), 0)
    sync = mesh.sync(offered if local else None)
    sync.push(1).result(HANG_S)
    before = {name: tensor.clone() for name, tensor in sink.state_dict().items()}
    replace(source)
    if not local:
        with pytest.raises(WeightSyncError, match=told):
            sync.push(2).result(HANG_S)
        assert member.weights.version == 1
    if fits:
        sync.push(3).result(HANG_S)
        assert torch.equal(sink.head.weight, source.embed.weight) and member.weights.version == 3
        return
    with pytest.raises(WeightSyncError, match="do not fit"):
        sync.push(3).result(HANG_S)
    assert all(torch.equal(before[name], tensor) for name, tensor in sink.state_dict().items())
    other = copy.deepcopy(source)
    mesh.restart_sink(ModuleSink(other), 0)
    with torch.no_grad():
        source.embed.weight += 1
    sync.push(4).result(HANG_S)
    assert same(source, other)


@pytest.mark.case("b11")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replace", [assigned, new_parameter, new_layer, new_buffer, there_and_back, only_a_mask])
def test_a_sink_whose_engine_replaced_its_parameters_gets_the_weights(
    mesh: WeightMesh, mode: Mode, replace: Callable[[Net], None]
) -> None:
    source, sink = Net(1), Net(2)
    mesh.add_source(ModuleSource(source))
    mesh.add_sink(ModuleSink(sink, mode), 0)
    sync = mesh.sync(bucket_bytes=64)
    for version in (1, 2, 3):
        sync.push(version).result(HANG_S)
        assert same(source, sink)
        with torch.no_grad():
            source.embed.weight += 1
        replace(sink)


@pytest.mark.case("b11")
@pytest.mark.parametrize("mode", MODES)
def test_a_sink_of_another_form_is_planned_anew(mesh: WeightMesh, mode: Mode) -> None:
    source, sink = Net(1), Net(2)
    mesh.add_source(ModuleSource(source))
    member = mesh.add_sink(ModuleSink(sink, mode), 0)
    sync = mesh.sync(allow_cast=True)
    sync.push(1).result(HANG_S)
    sink.half()
    with pytest.raises(WeightSyncError, match=r"receiver ROLLOUT:0 failed .*other names, shapes or types"):
        sync.push(2).result(HANG_S)
    sync.push(3).result(HANG_S)
    assert torch.equal(sink.head.weight, source.head.weight.half()) and member.weights.version == 3


@pytest.mark.case("b11")
@pytest.mark.parametrize("mode", MODES)
def test_a_sink_that_is_replaced_in_the_middle_of_a_push(mesh: WeightMesh, mode: Mode) -> None:
    source, sink = Net(1), Net(2)
    replaced = threading.Event()

    def tap(step: str, bucket: int) -> None:
        if step == "staged" and bucket == 0 and not replaced.is_set():
            replaced.set()
            new_parameter(sink)

    mesh.add_source(ModuleSource(source))
    member = mesh.add_sink(ModuleSink(sink, mode), 0, tap=tap)
    sync = mesh.sync(bucket_bytes=64)
    with pytest.raises(WeightSyncError, match="replaced parameters of its module during the push"):
        sync.push(1).result(HANG_S)
    assert member.weights.version is None
    sync.push(2).result(HANG_S)
    assert same(source, sink)


@pytest.mark.case("b11")
def test_arrays_that_are_replaced_are_those_that_are_sent(mesh: WeightMesh) -> None:
    weights, taken = arrays(1), arrays(0)
    sink = ArraySink(taken, "in_place")
    mesh.add_source(ArraySource(weights))
    mesh.add_sink(sink, 0)
    sync = mesh.sync()
    sync.push(1).result(HANG_S)
    weights.update(arrays(2))
    sink.arrays.update(arrays(3))
    sync.push(2).result(HANG_S)
    assert all(np.array_equal(sink.arrays[name], array) for name, array in weights.items())
    weights["layer.0"] = np.zeros(9, dtype=np.float32)
    with pytest.raises(WeightSyncError, match=r"layer.0 \[9\] float32, not layer.0 \[7\] float32"):
        sync.push(3).result(HANG_S)
    with pytest.raises(WeightSyncError, match="do not fit"):
        sync.push(3).result(HANG_S)
    sink.arrays["layer.0"] = np.zeros(9, dtype=np.float32)
    sync.push(4).result(HANG_S)
    sink.arrays["layer.0"] = np.zeros((9, 9), dtype=np.float32)  # NumPy would copy nine numbers into each of its rows
    with pytest.raises(WeightSyncError, match="other names, shapes or types"):
        sync.push(5).result(HANG_S)


@pytest.mark.case("b11")
def test_memory_that_was_given_up_ties_nothing() -> None:
    """An engine that is offloaded has its tensors at no place; they are not one for that."""
    model = Net(1)
    source = ModuleSource(model)
    before = source.manifest()
    held = [(p.untyped_storage(), p.untyped_storage().nbytes()) for p in model.parameters()]
    for storage, _ in held:
        storage.resize_(0)
    assert source.manifest() is before
    for storage, size in held:
        storage.resize_(size)
    assert source.manifest() is before


# Case a14.


class Torn(ArraySource):
    """Its weights change when a bucket is given, on the thread that gives it; and it says so."""

    at = -1

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        with super().gather(names) as tensors:
            yield tensors
        self.at -= 1
        if self.at == 0:
            for array in self.arrays.values():
                array += 1
            self.changed()


@pytest.mark.case("a14")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_version_that_changed_while_it_was_taken_is_not_committed(
    mesh: WeightMesh, snapshot: bool, mode: Mode, local: bool
) -> None:
    source = Torn(arrays(1))
    sinks = [ArraySink(arrays(0), mode) for _ in range(2)]
    members = [mesh.add_sink(sink, rank) for rank, sink in enumerate(sinks)]
    if not local:
        mesh.add_source(source)
    sync = mesh.sync(source if local else None, snapshot=snapshot, bucket_bytes=4096)
    sync.push(1).result(HANG_S)
    assert len(sync.plan().buckets) > 2
    source.at = 2
    with pytest.raises(WeightSyncError, match=r"version 2 was not committed: source .* the weights were changed"):
        sync.push(2).result(HANG_S)
    assert [member.weights.version for member in members] == [1 if mode == "double_buffer" else None] * 2
    sync.push(3).result(HANG_S)
    for sink in sinks:
        assert all(np.array_equal(sink.arrays[name], array) for name, array in source.arrays.items())


@pytest.mark.case("a14")
@pytest.mark.parametrize("what", ["a parameter", "a buffer", "another parameter"])
def test_a_module_that_changes_while_its_snapshot_is_taken(mesh: WeightMesh, what: str) -> None:
    model = Net(1)

    class Changing(ModuleSource):
        armed = False

        @contextmanager
        def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
            with super().gather(names) as tensors:
                yield tensors
            if self.armed:
                self.armed = False
                with torch.no_grad():
                    if what == "a parameter":
                        model.head.weight += 1
                    elif what == "a buffer":
                        model.scale += 1
                    else:
                        new_parameter(model)

    source, sink = Changing(model), Net(2)
    mesh.add_source(source)
    member = mesh.add_sink(ModuleSink(sink), 0)
    sync = mesh.sync(snapshot=True, bucket_bytes=64)
    sync.push(1).result(HANG_S)
    source.armed = True
    with pytest.raises(WeightSyncError, match="the weights were changed while their snapshot was taken"):
        sync.push(2).result(HANG_S)
    assert member.weights.version == 1
    sync.push(3).result(HANG_S)
    assert same(model, sink)


@pytest.mark.case("a14")
@pytest.mark.parametrize("local", [False, True])
def test_who_catches_up_gets_that_version_and_no_later_one(mesh: WeightMesh, local: bool) -> None:
    model, sink = Net(1), Net(2)
    source = ModuleSource(model)
    if not local:
        mesh.add_source(source)
    mesh.add_sink(ModuleSink(sink), 0)
    sync = mesh.sync(source if local else None)
    sync.push(1).result(HANG_S)
    sync.push(2).result(HANG_S)
    mesh.restart_sink(ModuleSink(sink), 0)
    assert sync.catch_up() == ("ROLLOUT:0",) and same(model, sink)
    back = mesh.restart_sink(ModuleSink(sink), 0)
    with torch.no_grad():
        model.head.weight += 1
    with pytest.raises(WeightSyncError, match="other weights than those that it sent as version 2"):
        sync.catch_up()
    assert back.weights.version is None
    sync.push(3).result(HANG_S)
    assert same(model, sink)
