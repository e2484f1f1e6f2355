"""What is too large is refused where it is sent from, before it is copied or sent, with its size and the cap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlmesh.errors import PayloadTooLarge, UsageError
from rlmesh.runtime.connections import network
from rlmesh.runtime.connections.network import NetworkOptions, options_of_environment
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.runtime.conftest import KEY

CAP = NetworkOptions(max_payload_bytes=1_000_000)


class Member:
    def __init__(self) -> None:
        self.calls = 0

    @rpc
    def size(self, value: object) -> int:
        self.calls += 1
        return len(value)  # type: ignore[arg-type]

    @rpc
    def make(self, size: int) -> bytes:
        return bytes(size)

    @rpc
    async def make_array(self, size: int) -> object:
        return np.zeros(size, np.uint8)

    @rpc
    def items(self, size: int) -> object:
        yield bytes(10)
        yield bytes(size)


def test_too_large_a_payload_is_refused_at_its_sender(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    member = Member()
    with (
        Runtime.start(name="A:0", key=KEY, socket_dir=tmp_path, network=CAP) as server,
        Runtime.start(name="caller", key=KEY, bind=False, network=CAP) as caller,
    ):
        server.serve("A:0", member)
        handle = caller.peer("A:0", server.endpoint or "").options(timeout_s=10)
        half = np.zeros(500_000, np.uint8)
        for large in (np.zeros(1_000_001, np.uint8), bytes(1_000_000), [half, half.copy(), "x" * 4000]):
            with pytest.raises(PayloadTooLarge, match=r"1,\d{3},\d{3} bytes are more .* 1,000,000 bytes: .*RLMESH_MAX"):
                handle.call("size", large)
        assert member.calls == 0
        assert handle.call("size", np.zeros(900_000, np.uint8)).result() == 900_000
        # Results are refused at the member, and the caller is told by the same class.
        for method in ("make", "make_array"):
            with pytest.raises(PayloadTooLarge, match=r"2,\d{3},\d{3} bytes are more .*raised by A:0"):
                handle.call(method, 2_000_000).result()
        with pytest.raises(PayloadTooLarge), handle.stream("items", 2_000_000) as stream:
            for item in stream:
                assert item == bytes(10)
        assert handle.call("size", b"fine").result() == 4


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (network.MAX_PAYLOAD_VARIABLE, "1G", "is no number of bytes"),
        (network.MAX_PAYLOAD_VARIABLE, "0", "is no number of bytes"),
        (network.PRIVATE_VARIABLE, "yes", "1 says that the network"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name}={value!r}.*{text}"):
        Runtime.start(key=KEY, bind=False)


def test_the_environment_sets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network.MAX_PAYLOAD_VARIABLE, "12345")
    monkeypatch.setenv(network.PRIVATE_VARIABLE, "1")
    assert options_of_environment() == NetworkOptions(max_payload_bytes=12345, private=True)
