"""Arrays and tensors of all kinds through calls: the same over each transport, in shared memory and without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.runtime.conftest import KEY

GIB = 1 << 30


@dataclass
class Batch:
    tokens: torch.Tensor
    extra: dict[str, Any]


class Member:
    def __init__(self) -> None:
        self.seen: Any = None

    @rpc
    def mirror(self, value: Any) -> Any:
        return value

    @rpc
    def overwrite(self, tensor: torch.Tensor) -> float:
        tensor.fill_(-1.0)
        return float(tensor.sum())

    @rpc
    def tail(self, array: np.ndarray) -> tuple[int, int, int]:
        return len(array), int(array[0]), int(array[-1])


@pytest.fixture(params=["unix", "ipc", "tcp", "unix, no shared memory"])
def member(request: pytest.FixtureRequest) -> Iterator[MemberHandle]:
    scheme, _, apart = request.param.partition(",")
    network = NetworkOptions(share_memory=not apart)
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        address = "tcp://127.0.0.1:*" if scheme == "tcp" else f"{scheme}://{directory}/m"
        with (
            Runtime.start(name="M:0", key=KEY, bind=address, network=network) as server,
            Runtime.start(name="caller", key=KEY, bind=False, network=network) as caller,
        ):
            assert server.endpoint is not None
            server.serve("M:0", Member())
            handle = caller.peer("M:0", server.endpoint)
            handle.call("mirror", 0).result()  # what they share is known from now on
            yield handle


def kinds() -> dict[str, Any]:
    read_only = np.arange(300_000)
    read_only.flags.writeable = False
    numbers = torch.arange(300_000, dtype=torch.float32)
    return {
        "float32": numbers,
        "bfloat16": numbers.to(torch.bfloat16),
        "bool": numbers > 5,
        "complex": torch.complex(numbers, -numbers).conj(),
        "transposed": numbers.reshape(300, 1000).t(),
        "strided": numbers[3::7],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(4, 0, 2),
        "array": np.arange(300_000, dtype=np.int16),
        "fortran": np.asfortranarray(np.arange(300_000.0).reshape(300, 1000)),
        "reversed": np.arange(300_000)[::-1],
        "read-only": read_only,
        "no items": np.zeros((0, 3)),
        "text": np.array(["a", "bcd"] * 50_000),
        "objects": np.array([1, "x", None], dtype=object),
    }


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first.dtype == second.dtype and first.shape == second.shape and bool(np.array_equal(first, second))


def test_each_kind_comes_back_as_it_was(member: MemberHandle) -> None:
    sent = kinds()
    back = member.call("mirror", Batch(sent["float32"], {"all": [sent], "again": sent["float32"]})).result()
    assert isinstance(back, Batch) and torch.equal(back.tokens, sent["float32"])
    got = back.extra["all"][0]
    assert list(got) == list(sent)
    assert {name for name in sent if not same(sent[name], got[name])} == set()
    assert torch.equal(back.extra["again"], back.tokens)


def test_nobody_sees_what_the_others_write(member: MemberHandle) -> None:
    tensor = torch.ones(1 << 20)
    call = member.call("overwrite", tensor)
    tensor.fill_(5.0)  # captured before
    assert call.result() == -float(1 << 20)
    assert float(tensor.sum()) == 5.0 * (1 << 20)
    back = member.call("mirror", tensor).result()
    back.fill_(7.0)
    assert float(tensor[0]) == 5.0
    assert float(member.call("mirror", tensor).result()[0]) == 5.0, "the memory is used again, without what was written"


@pytest.mark.slow
def test_one_call_carries_more_than_4_gib() -> None:
    """There through shared memory; sizes and places beyond 32 bits."""
    nbytes = 4 * GIB + 4096
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    if available < nbytes + 3 * GIB:
        pytest.skip("not enough memory")
    array = np.zeros(nbytes, dtype=np.uint8)  # one page of zeros until it is written to
    array[0], array[-1] = 7, 9
    with (
        tempfile.TemporaryDirectory(prefix="rlm-") as directory,
        Runtime.start(name="M:0", key=KEY, socket_dir=directory) as server,
        Runtime.start(name="caller", key=KEY, bind=False) as caller,
    ):
        assert server.endpoint is not None
        server.serve("M:0", Member())
        member = caller.peer("M:0", server.endpoint)
        member.call("mirror", 0).result()
        assert member.call("tail", array).result() == (nbytes, 7, 9)
        assert caller._shm.exchange.exhausted == 0
