"""Somebody on the path of an unencrypted connection adds bytes to it: nothing of that is decoded, and it ends."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh.errors import PeerLost
from rlmesh.runtime.calling import peer_connections
from rlmesh.runtime.connections.bulk_channels import _SealedLink
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.wire.envelope import ANY_INCARNATION, Bulk, BulkPart, Call, Frames, Reply, pack
from tests.own_time import HANG_S
from tests.runtime.test_lanes import MIB, Tcp


class Touch:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tcp]:
    monkeypatch.setattr(peer_connections, "LOSS_GRACE_S", 0.05)  # Nobody dies, so no news of a death is waited for.
    made = Tcp(NetworkOptions(share_memory=False, private=True))
    try:
        yield made
    finally:
        made.close()


def evil(path: Path) -> bytes:
    return pickle.dumps(((Touch(path),), {}))


CALL = Call(1 << 40, "A:0", ANY_INCARNATION, "ping", 10.0, 0, ())
ATTACKS: dict[str, Callable[[Path], Frames]] = {
    "a call": lambda path: pack([(CALL, [evil(path)])]),
    "a reply": lambda path: pack([(Reply(1, True, 0, 0, 0), [evil(path)])]),
    "a payload": lambda path: pack([(Bulk(1, (len(evil(path)),)), [evil(path)])]),
    "a part": lambda path: pack([(BulkPart(1), [evil(path)])]),
    "noise": lambda path: [b"noise", b"more"],
}


@pytest.mark.case("a06")
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("at", ["the member", "the caller"])
def test_what_is_injected_ends_the_connection(
    tcp: Tcp, attack: str, at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = np.arange(2 * MIB, dtype=np.uint8)
    assert (tcp.handle.call("echo", data).result(HANG_S) == data).all()
    victim = tcp.server if at == "the member" else tcp.caller
    other = tcp.caller if at == "the member" else tcp.server
    (carrier,) = other.inbound.bulk._connections
    made = tmp_path / "made"
    other.post(carrier.link.send, ATTACKS[attack](made))  # Bytes in the stream, as another on its path can put there.
    with pytest.raises(PeerLost):
        while True:
            tcp.handle.call("echo", data).result(HANG_S)
    assert not made.exists(), "nothing of it was decoded"
    assert victim.strangers.counts["wrong key"] == 1 and "unencrypted connection" in caplog.text, "and it is told"


@pytest.mark.case("a06")
def test_not_even_the_jobs_own_processes_make_calls_over_it(tcp: Tcp) -> None:
    data = np.arange(2 * MIB, dtype=np.uint8)
    tcp.handle.call("echo", data).result(HANG_S)
    (lane,) = tcp.caller.inbound.bulk._connections.values()
    assert lane.sender is not None
    link = lane.sender._link
    assert isinstance(link, _SealedLink)
    tcp.caller.post(link.send, pack([(CALL._replace(method="keep"), [pickle.dumps(((1,), {}))])]))
    with pytest.raises(PeerLost):
        while True:
            tcp.handle.call("echo", data).result(HANG_S)
    assert tcp.member.seen == []


@pytest.mark.case("a06")
@pytest.mark.parametrize("size", [0, 1, 100, MIB - 1, MIB, MIB + 1, 9 * MIB + 7])
def test_payloads_of_every_size_pass(tcp: Tcp, size: int) -> None:
    data = [np.arange(3 * MIB, dtype=np.uint8), np.arange(size, dtype=np.uint8), np.zeros(0)]
    for _ in range(3):
        back = tcp.handle.call("echo", data).result(HANG_S)
        assert all((a == b).all() for a, b in zip(back, data, strict=True))
