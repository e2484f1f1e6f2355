"""CUDA tensors as arguments and results between two processes on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rlmesh.errors import CallError, PeerLost
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.runtime import Runtime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

KEY = b"cuda-tests-0123456789abcdefg--32"
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def until(condition: Callable[[], bool], wait_s: float = 10.0) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.002)


class Pair:
    """This process, and a member in another."""

    def __init__(self, runtime: Runtime, member: MemberHandle, process: subprocess.Popen[str], errors: Path) -> None:
        self.runtime, self.member, self.process, self.errors = runtime, member, process, errors
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated()

    def freed(self) -> bool:
        """Whether this process holds no more device memory than at the start."""
        self.runtime._shm.exchange.trim(1e9)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() <= self.before


@contextmanager
def pair_of(network: NetworkOptions | None = None, **env: str) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="rlm-") as sockets:
        errors = Path(sockets) / "errors"
        command = [sys.executable, "-m", "tests.gpu.cuda_peer", KEY.hex(), sockets]
        with (
            errors.open("w") as file,
            subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=file, text=True,
            ) as process,
        ):  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            try:
                endpoint = process.stdout.readline().strip()
                with Runtime.start(name="caller", key=KEY, bind=False, job_id="cuda", network=network) as runtime:
                    member = runtime.peer("M:0", endpoint)
                    member.call("warm_up").result(120)
                    yield Pair(runtime, member, process, errors)
                process.stdin.close()
                process.wait(20)
            finally:
                process.kill()
        for left in Path("/dev/shm").glob(f"rlmesh-cuda-*-{process.pid}-*"):
            left.unlink()  # of a member that was killed; its agent would do so


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with pair_of() as made:
        # Segments of both sides are there before the first test looks at what there is.
        made.member.call("mirror", torch.ones(MIB, device="cuda")).result()
        made.member.call("mirror", torch.ones(MIB)).result()
        until(made.freed)
        yield made


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(1 << 20, dtype=torch.float32, device="cuda"),
        lambda: torch.arange(300_000, device="cuda").to(torch.bfloat16).reshape(300, 1000),
        lambda: torch.arange(1 << 20, device="cuda").reshape(1024, 1024).t(),
        lambda: torch.arange(1 << 20, device="cuda")[5::3],
        lambda: torch.arange(7, device="cuda"),
        lambda: torch.ones(3, 0, 2, device="cuda"),
        lambda: torch.ones(1 << 20, dtype=torch.bool, device="cuda"),
        lambda: torch.randn(1 << 19, dtype=torch.complex64, device="cuda").conj(),
    ],
    ids=["float32", "bfloat16", "transposed", "strided", "small", "empty", "bool", "conjugate"],
)
def test_a_tensor_comes_back_the_same_in_memory_of_its_own(pair: Pair, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    back = pair.member.call("mirror", {"x": [tensor]}).result()["x"][0]
    assert back.device == tensor.device and back.dtype == tensor.dtype and torch.equal(back, tensor)
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or tensor.numel() == 0
    del tensor, back
    until(pair.freed)


def test_a_parameter_stays_one(pair: Pair) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 18, device="cuda"))
    back = pair.member.call("mirror", parameter).result()
    assert isinstance(back, torch.nn.Parameter) and back.requires_grad and back.is_cuda


def test_arguments_are_captured_and_each_side_writes_to_its_own(pair: Pair) -> None:
    tensor = torch.ones(4 * MIB, device="cuda")
    torch.cuda._sleep(50_000_000)  # the stream is busy: the copy is not made when call() returns
    tensor.mul_(2.0)
    call = pair.member.call("facts", tensor)
    tensor.zero_()
    assert call.result() == ("cuda:0", 8.0 * MIB)
    tensor.fill_(1.0)
    assert pair.member.call("write", tensor).result() == 12.0 * MIB
    assert float(tensor.sum()) == 4.0 * MIB


def test_what_a_receiver_keeps_is_its_own(pair: Pair) -> None:
    for number in range(4):
        pair.member.call("keep", torch.full((4 * MIB,), float(number), device="cuda")).result()
    until(pair.freed)
    junk = [torch.full((4 * MIB,), -1.0, device="cuda") for _ in range(8)]
    assert pair.member.call("sum_of_kept").result() == [0.0, 4.0 * MIB, 8.0 * MIB, 12.0 * MIB]
    del junk


def test_a_receiver_that_is_killed_keeps_nothing() -> None:
    with pair_of() as pair:
        calls = [pair.member.call("keep", torch.ones(16 * MIB, device="cuda")) for _ in range(8)]
        calls[2].result()
        pair.process.kill()
        pair.process.wait(20)
        assert all(call.exception() is None or isinstance(call.exception(), PeerLost) for call in calls)
        until(pair.freed)


def test_what_came_from_a_sender_that_is_killed_is_still_there() -> None:
    with pair_of() as pair:
        first = pair.member.call("give", 64).result()
        pair.process.kill()
        pair.process.wait(20)
        assert torch.equal(first, torch.arange(64 << 18, dtype=torch.float32, device="cuda"))
    torch.cuda.synchronize()


def test_a_mask_that_hides_the_gpu_is_told() -> None:
    with pair_of(CUDA_VISIBLE_DEVICES="") as pair:
        with pytest.raises(CallError, match=r"CUDA_VISIBLE_DEVICES=''.*tensor\.cpu\(\)"):
            pair.member.call("facts", torch.ones(MIB, device="cuda")).result()
        until(pair.freed)
        assert pair.member.call("facts", torch.ones(MIB)).result() == ("cpu", float(MIB))


@pytest.mark.parametrize("option", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_without_handles_goes_through_the_host(option: str) -> None:
    with pair_of(PYTORCH_CUDA_ALLOC_CONF=option) as pair:
        back = pair.member.call("give", 8).result()
        assert back.is_cuda and torch.equal(back, torch.arange(8 << 18, dtype=torch.float32, device="cuda"))
        assert "expandable_segments:True or backend:cudaMallocAsync" in pair.errors.read_text()
        assert pair.member.call("take", back).result() == float(back[-1])


def test_without_shared_memory_the_bytes_go_through_the_host() -> None:
    with pair_of(NetworkOptions(share_memory=False)) as pair:
        tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
        assert torch.equal(pair.member.call("mirror", tensor).result(), tensor)
