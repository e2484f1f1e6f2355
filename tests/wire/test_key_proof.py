"""Packets over a connection that is not encrypted: only what the peer sent, once, in its order."""

from __future__ import annotations

import pytest

from rlmesh.errors import AuthenticationFailed
from rlmesh.wire.envelope import Frames
from rlmesh.wire.key_proof import Seal

KEY = b"k" * 32


def pair() -> tuple[Seal, Seal]:
    return Seal(KEY, "token", "caller"), Seal(KEY, "token", "caller")


@pytest.mark.case("a06")
def test_packets_arrive_as_they_were_sent() -> None:
    sender, receiver = pair()
    packets: list[Frames] = [[b"one"], [b"", b"two", memoryview(b"three" * 1000)], [b"one"]]
    for frames in packets:
        opened = receiver.open([bytes(frame) for frame in sender.close(frames)])
        assert opened == [bytes(frame) for frame in frames]


@pytest.mark.case("a06")
@pytest.mark.parametrize(
    "attack",
    [
        lambda first, second: first[:-1],
        lambda first, second: [b"x", *first],
        lambda first, second: [first[0], b"evil", first[2]],
        lambda first, second: [first[0][:-1], first[0][-1:] + first[1], first[2]],
        lambda first, second: [first[0], first[1], b"\0" * 32],
        lambda first, second: second,
        lambda first, second: [],
        lambda first, second: [b"\0" * 32],
        lambda first, second: Seal(b"j" * 32, "token", "caller").close(first[:-1]),
        lambda first, second: Seal(KEY, "other", "caller").close(first[:-1]),
        lambda first, second: Seal(KEY, "token", "listener").close(first[:-1]),
    ],
    ids=[
        "unsealed", "added", "changed", "cut elsewhere", "guessed", "one left out", "empty", "a tag alone",
        "another job", "another connection", "the other direction",
    ],
)  # fmt: skip
def test_anything_else_is_refused(attack: object) -> None:
    sender, receiver = pair()
    first, second = sender.close([b"head", b"payload"]), sender.close([b"head", b"payload"])
    forged: Frames = attack(first, second)  # type: ignore[operator]
    with pytest.raises(AuthenticationFailed, match="unencrypted connection"):
        receiver.open(forged)


@pytest.mark.case("a06")
def test_a_packet_counts_once() -> None:
    sender, receiver = pair()
    packet = sender.close([b"head", b"payload"])
    receiver.open(packet)
    with pytest.raises(AuthenticationFailed):
        receiver.open(packet)
