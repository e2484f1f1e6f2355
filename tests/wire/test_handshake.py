"""The handshake admits processes that hold the key, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import AuthenticationFailed, MalformedFrame, VersionMismatch, WireError
from rlmesh.wire import handshake
from rlmesh.wire.handshake import LIMIT_BYTES, CallerHandshake, HandshakeMessage, ListenerHandshake, Step, parse

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
HERE = "unix:///run/rlm/a"


def converse(
    opening: CallerHandshake, key: bytes = KEY, *, alter: tuple[int, int, int] | None = None, here: str = HERE
) -> str:
    """A whole handshake; ``alter`` is message, position and bits of one byte that is changed on its way."""

    def carry(number: int, message: HandshakeMessage) -> HandshakeMessage:
        data = bytearray(message.pack()[0])
        if alter is not None and alter[0] == number:
            data[alter[1] % len(data)] ^= alter[2]
        return parse([bytes(data)])

    admission = ListenerHandshake(key, "A:0", here, carry(0, opening.hello))
    return admission.admit(carry(2, opening.answer(carry(1, admission.challenge))))


@given(st.text(max_size=300), st.sampled_from([HERE, "tcp://10.0.0.1:7", "loop://x", "ipc:///tmp/y"]))
def test_holders_of_the_key_find_each_other(name: str, here: str) -> None:
    found = converse(CallerHandshake(KEY, name, here), here=here)
    assert name.startswith(found) and len(found.encode()) <= 256


@given(st.integers(0, 2), st.integers(0, 400), st.integers(1, 255))
def test_one_changed_byte_anywhere_is_refused(message: int, position: int, bits: int) -> None:
    with pytest.raises(WireError):
        converse(CallerHandshake(KEY, "B:1", HERE), alter=(message, position, bits))


def test_another_key_is_refused_by_both_sides() -> None:
    opening = CallerHandshake(OTHER, "B:1", HERE)
    admission = ListenerHandshake(KEY, "A:0", HERE, opening.hello)
    with pytest.raises(AuthenticationFailed, match="does not hold the key"):
        opening.answer(admission.challenge)
    liar = HandshakeMessage(Step.PROOF, opening.hello.version, bytes(32), bytes(32), "")
    with pytest.raises(AuthenticationFailed, match="'B:1' does not hold the key of this job, or replays"):
        admission.admit(liar)


def test_what_was_recorded_is_worth_nothing() -> None:
    opening = CallerHandshake(KEY, "B:1", HERE)
    first = ListenerHandshake(KEY, "A:0", HERE, opening.hello)
    proof = opening.answer(first.challenge)
    assert first.admit(proof) == "B:1"
    again = ListenerHandshake(KEY, "A:0", HERE, opening.hello)
    with pytest.raises(AuthenticationFailed):
        again.admit(proof)
    with pytest.raises(AuthenticationFailed):
        CallerHandshake(KEY, "B:1", HERE).answer(first.challenge)


def test_a_proof_cannot_be_reflected_or_carried_to_another_address() -> None:
    opening = CallerHandshake(KEY, "B:1", HERE)
    admission = ListenerHandshake(KEY, "A:0", HERE, opening.hello)
    with pytest.raises(AuthenticationFailed):
        admission.admit(HandshakeMessage(Step.PROOF, opening.hello.version, bytes(32), admission.challenge.proof, ""))
    with pytest.raises(AuthenticationFailed):
        converse(CallerHandshake(KEY, "B:1", HERE), here="unix:///run/rlm/b")


def test_another_version_is_told_once_the_key_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = CallerHandshake(KEY, "B:1", HERE)
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 99)
    admission = ListenerHandshake(KEY, "A:0", HERE, opening.hello)
    monkeypatch.undo()
    with pytest.raises(VersionMismatch, match=r"version 99.*same version of rlmesh"):
        opening.answer(admission.challenge)
    with pytest.raises(AuthenticationFailed):
        CallerHandshake(OTHER, "B:1", HERE).answer(admission.challenge)


@given(st.lists(st.binary(max_size=LIMIT_BYTES + 10), max_size=3))
def test_noise_is_malformed(frames: list[bytes]) -> None:
    with pytest.raises(MalformedFrame):
        parse(list(frames))


@given(st.integers(0, LIMIT_BYTES), st.sampled_from(list(Step)))
def test_a_truncated_handshake_is_malformed(length: int, step: Step) -> None:
    whole = HandshakeMessage(step, 1, b"n" * 32, b"p" * 32, "B:1").pack()[0]
    if length < len(whole):
        with pytest.raises(MalformedFrame):
            parse([whole[:length]])
