"""Weights from one process's GPU memory into another's: on one GPU, between two, from shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlmesh.errors import WeightSyncError
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.cuda.devices import reference, sum_by_torch
from rlmesh.weights.module_sink import ModuleSink
from rlmesh.weights.module_source import ModuleSource
from rlmesh.weights.sync import WeightSync
from tests.gpu.weights_peer import Model, plain, values
from tests.settling import settle
from tests.weights.mesh import WeightMesh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

KEY = b"cuda-tests-0123456789abcdefg--32"
ROOT = Path(__file__).resolve().parents[2]
BUCKET = 1 << 20


def until(condition: Any, wait_s: float = 20.0) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.002)


class Mesh:
    """This process as the caller, and members in processes of their own."""

    def __init__(self, sockets: str) -> None:
        self.sockets, self.processes, self.rows = sockets, dict[str, subprocess.Popen[str]](), list[list[Any]]()
        self.caller = Runtime.start(name="caller", key=KEY, socket_dir=sockets, job_id="wgpu")

    def start(self, specs: list[tuple[str, int, int, str, str]], **env: str) -> None:
        """Role, rank, ranks (as `weights_peer` has them), device, mode."""
        started = []
        for role, rank, ranks, device, mode in specs:
            command = [sys.executable, "-m", "tests.gpu.weights_peer", KEY.hex(), self.sockets, role, str(rank),
                       str(ranks), device, mode]  # fmt: skip
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.processes[f"{role}:{rank}"] = process
            started.append((role, rank, process))
        for role, rank, process in started:
            assert process.stdout is not None
            endpoint, pid = process.stdout.readline().split()
            self.rows.append([role, rank, 0, endpoint, None, int(pid)])
        book = AddressBook(1, tuple(MemberAddress(row[0], row[1], row[2], row[3]) for row in self.rows))
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.write(json.dumps([1, [row[:4] for row in self.rows]]) + "\n")
            process.stdin.flush()
        self.caller.set_address_book(book)
        settle(self.caller)

    def sync(self, source: Any = None, *, sinks: slice = slice(None), **options: Any) -> WeightSync:
        group: RoleGroup[Any] = RoleGroup("SINK", runtime=self.caller)
        return WeightSync(
            source if source is not None else RoleGroup("SOURCE", runtime=self.caller), group[sinks],
            bucket_bytes=BUCKET, runtime=self.caller, **options,
        )  # fmt: skip

    def ask(self, role: str, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = RoleGroup[Any](role, runtime=self.caller).call(method, *args).result(60)
        return answers

    def close(self) -> None:
        """End all members together, as a job does: ranks of a process group leave it together."""
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
        try:
            for process in self.processes.values():
                process.wait(30)
        finally:
            for process in self.processes.values():
                assert process.stdout is not None
                process.kill()
                process.wait()
                process.stdout.close()
            self.caller.close()


@contextmanager
def mesh() -> Iterator[Mesh]:
    with ExitStack() as stack:
        made = Mesh(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlm-")))
        stack.callback(made.close)
        yield made


def near(a: dict[str, list[float]], b: dict[str, list[float]]) -> bool:
    return a.keys() == b.keys() and all(a[name] == pytest.approx(b[name], nan_ok=True) for name in a)


SINKS = [(gpu, mode) for gpu in range(min(torch.cuda.device_count(), 2)) for mode in ("double_buffer", "in_place")]


@pytest.fixture(scope="module")
def sinks() -> Iterator[Mesh]:
    """One of each mode on up to two GPUs."""
    with mesh() as members:
        members.start([("SINK", rank, 0, f"cuda:{gpu}", mode) for rank, (gpu, mode) in enumerate(SINKS)])
        members.ask("SINK", "state")  # what the first call leaves is there before the first test looks
        yield members


def make_source(expandable: bool) -> Model:
    if not expandable:
        return Model(1, "cuda:0")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        return Model(1, "cuda:0")
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def check(members: Mesh, source: Model, version: int, ranks: slice = slice(None)) -> None:
    wanted = values(source)
    for served, got in members.ask("SINK", "state")[ranks]:
        assert served == version and near(got, wanted)


@pytest.mark.case("O18")
@pytest.mark.parametrize("which", [slice(None), *(slice(rank, rank + 1) for rank in range(len(SINKS)))], ids=str)
@pytest.mark.parametrize("how", ["direct", "direct, no checksums", "with strides", "snapshot", "expandable"])
def test_values_arrive_push_after_push(sinks: Mesh, which: slice, how: str) -> None:
    source = make_source(how == "expandable")
    if "direct" in how:
        source.across.data = source.across.data.contiguous()
    with sinks.sync(
        ModuleSource(source), sinks=which, snapshot=how == "snapshot", verify="no checksums" not in how
    ) as sync:
        assert "by cuda_ipc" in str(sync.plan()) and len(sync.plan().buckets) > 2
        for version in range(6):
            with torch.no_grad():
                source.rows[5].add_(1)
                source.across.mul_(-1)
            sync.push(version).result(60)
            check(sinks, source, version, which)
        # Weights that were moved since are found where they are now, also if that is at the same address.
        source.rows[5].data = source.rows[5].data.clone() + 3
        sync.push(10).result(60)
        check(sinks, source, 10, which)
        for version in (11, 12):
            here = source.rows[5].data.cpu()
            source.rows[5].data = torch.empty(0)
            torch.cuda.empty_cache()
            source.rows[5].data = here.cuda() + 1
            sync.push(version).result(60)
            check(sinks, source, version, which)


@pytest.mark.case("O18")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs here")
@pytest.mark.parametrize("snapshot", [False, True])
def test_sinks_read_a_gpu_that_their_mask_hides(snapshot: bool) -> None:
    """As in a job, whose members see only their own GPUs."""
    source = Model(1, "cuda:0")
    with mesh() as members:
        members.start(
            [("SINK", 0, 0, "cuda:0", "double_buffer"), ("SINK", 1, 0, "cuda:0", "in_place")], CUDA_VISIBLE_DEVICES="1"
        )
        with members.sync(ModuleSource(source), snapshot=snapshot) as sync:
            assert "by cuda_ipc: peer GPUs of one node" in str(sync.plan())
            for version in range(6):
                with torch.no_grad():
                    source.rows[5].add_(1)
                sync.push(version).result(60)
                check(members, source, version)


@pytest.mark.case("O18")
def test_rollback_is_the_version_before(sinks: Mesh) -> None:
    source = Model(3, "cuda:0")
    with sinks.sync(ModuleSource(source), sinks=slice(0, 1)) as sync:
        pushed = []
        for version in range(4):
            with torch.no_grad():
                source.rows[5].add_(1)
            pushed.append(values(source))
            sync.push(version).result(60)
        assert sync.rollback() == 2
        served, got = sinks.ask("SINK", "state")[0]
        assert served == 2 and near(got, pushed[2]) and not near(got, pushed[3])
        for version in range(5, 8):
            with torch.no_grad():
                source.rows[5].add_(1)
            sync.push(version).result(60)
            check(sinks, source, version, slice(0, 1))


@pytest.mark.case("O16")
def test_device_memory_is_flat_over_many_pushes(sinks: Mesh) -> None:
    source = Model(1, "cuda:0")
    with sinks.sync(ModuleSource(source)) as sync:
        for version in range(5):
            sync.push(version).result(60)
        torch.cuda.synchronize()
        mine, theirs = torch.cuda.memory_allocated(), sinks.ask("SINK", "allocated")
        free = torch.cuda.mem_get_info(0)[0]
        for version in range(5, 105):
            sync.push(version).result(60)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == mine and sinks.ask("SINK", "allocated") == theirs
        assert abs(torch.cuda.mem_get_info(0)[0] - free) < 8 << 20


@pytest.mark.case("O16")
def test_a_sink_that_is_killed_does_not_hold_the_source_up() -> None:
    source = Model(1, "cuda:0")
    with mesh() as members:
        members.start([("SINK", rank, 0, "cuda:0", "double_buffer") for rank in (0, 1)])
        with members.sync(ModuleSource(source), bucket_timeout_s=5.0) as sync:
            for version in range(3):
                sync.push(version).result(60)
            members.processes["SINK:1"].kill()
            with pytest.raises(WeightSyncError, match=r"version 3 was not committed: receiver SINK:1 failed"):
                sync.push(3).result(60)
            handle = RoleGroup[Any]("SINK", runtime=members.caller)[0]
            assert handle.call("state").result(60)[0] == 2


def test_a_write_that_torch_does_not_count_is_seen_by_the_checksums(
    sinks: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by a kernel of one's own, which torch knows nothing of, between the checksum and the copy."""
    source = Model(1, "cuda:0")
    source.across.data = source.across.data.contiguous()  # so that all of it is read where it is

    class Sly(ModuleSource):
        def stamp(self) -> object:
            return 0

    with sinks.sync(Sly(source)) as sync:
        sync.push(1).result(60)
        from rlmesh.weights.channels.cuda_ipc import CudaIpcSender

        put = CudaIpcSender.put

        def altered(self: CudaIpcSender, *args: Any) -> Any:
            transfer = put(self, *args)
            with torch.no_grad():
                source.rows[5].view(-1)[12345] += 1
            torch.cuda.synchronize()
            return transfer

        with monkeypatch.context() as patched:
            patched.setattr(CudaIpcSender, "put", altered)
            with pytest.raises(WeightSyncError, match=r"arrived altered: the checksums of rows.5"):
                sync.push(2).result(60)
        sync.push(3).result(60)


@contextmanager
def announced_early(mode: str, **options: Any) -> Iterator[tuple[Mesh, nn.Module, WeightSync]]:
    """A source whose snapshot is announced when its copy has begun: all its sizes are whole words. Two sinks."""
    source = plain(7, "cuda:0", 8)
    with mesh() as members:
        members.start([("SINK", rank, -1, "cuda:0", mode) for rank in (0, 1)])
        with members.sync(ModuleSource(source), snapshot=True, **options) as sync:
            yield members, source, sync


def change(source: nn.Module) -> None:
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(-1).add_(1)


def held_up(seconds: int = 1) -> None:
    """Whatever is launched next begins about so much later."""
    for _ in range(seconds):
        torch.cuda._sleep(1_700_000_000)  # cycles


@pytest.mark.case("O18")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
def test_a_snapshot_is_what_the_weights_were(mode: str, verify: bool) -> None:
    """They are changed as soon as the push returns, while the sinks wait or copy."""
    with announced_early(mode, verify=verify) as (members, source, sync):
        for version in range(8):
            wanted = values(source)
            if version % 3 == 2:
                held_up()
            future = sync.push(version)
            change(source)
            future.result(60)
            for served, got in members.ask("SINK", "state"):
                assert served == version and near(got, wanted)


@pytest.mark.case("O18")
def test_a_snapshot_that_is_altered_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlmesh.weights.channels.cuda_ipc import CudaIpcSender

    put = CudaIpcSender.put

    def altered(self: CudaIpcSender, *args: Any) -> Any:
        transfer = put(self, *args)
        assert not transfer.checksums, "they lie in the memory of the snapshot"
        torch.cuda.synchronize()
        transfer.data[0].targets[1].view(-1)[5] ^= 1
        torch.cuda.synchronize()
        return transfer

    with announced_early("double_buffer") as (members, _source, sync):
        sync.push(1).result(60)
        with monkeypatch.context() as patched:
            patched.setattr(CudaIpcSender, "put", altered)
            with pytest.raises(WeightSyncError, match=r"arrived altered: the checksums of 1 "):
                sync.push(2).result(60)
        assert [served for served, _ in members.ask("SINK", "state")] == [1, 1]
        sync.push(3).result(60)


@pytest.mark.case("O16")
def test_a_snapshot_that_is_not_made_in_time_fails_the_push() -> None:
    with announced_early("double_buffer", bucket_timeout_s=5) as (members, _source, sync):
        sync.push(1).result(60)
        held_up(7)
        with pytest.raises(WeightSyncError, match="has not made its snapshot in time"):
            sync.push(2).result(60)
        assert [served for served, _ in members.ask("SINK", "state")] == [1, 1]
        sync.push(3).result(60)
        assert [served for served, _ in members.ask("SINK", "state")] == [3, 3]


@pytest.mark.case("O16")
@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
def test_a_source_that_is_killed_in_its_snapshot_does_not_hold_the_sink_up(mode: str) -> None:
    with mesh() as members:
        members.start([(role, 0, -1, "cuda:0", mode) for role in ("SOURCE", "SINK")])
        with members.sync(snapshot=True) as sync:
            for version in (1, 2):
                sync.push(version).result(60)
            members.ask("SOURCE", "hold_up", 30)
            future = sync.push(3)
            time.sleep(1)
            assert not future.done()
            members.processes["SOURCE:0"].kill()
            began = time.monotonic()
            with pytest.raises(WeightSyncError, match="version 3 was not committed: "):
                future.result(60)
            # This command has its turn after the one that waited for the snapshot.
            described = RoleGroup[Any]("SINK", runtime=members.caller)[0].call("weights_sink_describe").result(60)
            assert time.monotonic() - began < 10
            assert described.version == (2 if mode == "double_buffer" else None)


@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_sink_in_the_process_of_its_source_gets_every_version(snapshot: bool, mode: Any) -> None:
    """As fused roles are: a process cannot open its own handles."""
    source, sink = Model(1, "cuda:0"), Model(2, "cuda:0")
    with tempfile.TemporaryDirectory(prefix="rlm-") as sockets:
        here = WeightMesh(Path(sockets))
        try:
            here.add_sink(ModuleSink(sink, mode), 0)
            sync = here.sync(ModuleSource(source), bucket_bytes=BUCKET, snapshot=snapshot)
            for version in range(4):
                with torch.no_grad():
                    source.rows[5].add_(1)
                sync.push(version).result(60)
                assert near(values(sink), values(source))
            assert "by cuda_ipc: same GPU" in str(sync.plan())
        finally:
            here.close()


@pytest.mark.case("O18")
@pytest.mark.parametrize("gpus", [(0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 2, 3)], ids=str)
def test_shards_of_two_ranks_come_together_at_two_sinks(gpus: tuple[int, ...]) -> None:
    """GPUs of the source's ranks and of the sinks."""
    if torch.cuda.device_count() <= max(gpus):
        pytest.skip("there are not enough GPUs")
    ways: list[dict[str, Any]] = [{}, {"verify": False}, {"snapshot": True}]
    if len(set(gpus)) == len(gpus):  # NCCL wants a GPU of its own for each end
        ways.append({"channel": "collective"})
    backend = "nccl" if gpus[0] != gpus[1] else "gloo"  # NCCL refuses two ranks on one GPU
    roles = ("SOURCE", 0, backend), ("SOURCE", 1, backend), ("SINK", 0, "in_place"), ("SINK", 1, "in_place")
    with mesh() as members:
        members.start(
            [(role, rank, 2, f"cuda:{gpu}", mode) for (role, rank, mode), gpu in zip(roles, gpus, strict=True)]
        )
        for options in ways:
            with members.sync(**options) as sync:
                assert ("each rank sends its own shards" in str(sync.plan())) == ("channel" not in options)
                for version in range(4):
                    members.ask("SOURCE", "change", version)
                    sync.push(version).result(60)
                    wanted = members.ask("SOURCE", "state")[0]
                    for served, got in members.ask("SINK", "state"):
                        assert served == version and near(got, wanted)


@pytest.mark.parametrize("size", [0, 8, 40, 8 * 4096, 8 * 4096 * 3 + 16, (1 << 22) + 8, 12345])
def test_the_gpu_sums_as_the_definition_says(size: int) -> None:
    from rlmesh.weights.cuda.copies import copy

    piece = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    other = torch.randint(0, 256, (64,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(size + 16, dtype=torch.uint8, device="cuda")
    sums = copy([other, piece], [torch.zeros_like(other), target], [64, size], [0, 16], summed=True)
    assert sums[1] == reference(bytes(piece.cpu().numpy())) == sum_by_torch(piece.cpu())
    assert torch.equal(target[16:], piece) and copy([piece, other], None, [size, 64], summed=True) == sums[::-1]
