"""The handshake: two processes prove to each other that they hold the job's key, before anything else is read.

::

    caller                                     listener
      HELLO      version, nonce, name     →
                                          ←    CHALLENGE  version, nonce, proof, name
      PROOF      proof                    →

A proof is a keyed hash over both sides' nonces, versions and names and the address, with a label for the side
that gives it. Both nonces are new in each handshake, so a recorded handshake cannot be replayed; the label keeps one
side's proof from serving as the other's. The caller sends only its hello before the listener has proved itself, so a
stranger at a job's old address learns nothing.

Each message is one packet of one frame with the same fixed layout in every version of the protocol; it is read
by position, without a decoder. No I/O.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import NamedTuple

from rlmesh.errors import AuthenticationFailed, MalformedFrame, VersionMismatch
from rlmesh.wire.envelope import PROTOCOL_VERSION, Frames
from rlmesh.wire.key_proof import NONCE_BYTES, Side, is_equal, keyed_hash, make_nonce

NAME_LIMIT_BYTES = 256

_MAGIC = b"RLMG"
_LAYOUT = struct.Struct(f"<4sBHH{NONCE_BYTES}s32s")
LIMIT_BYTES = _LAYOUT.size + NAME_LIMIT_BYTES
"""No packet of a handshake is larger."""
_EMPTY = bytes(32)


class Step(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3


class HandshakeMessage(NamedTuple):
    """A message of the handshake; fields that its step does not use are zero or empty."""

    step: int
    version: int
    nonce: bytes
    proof: bytes
    name: str

    def pack(self) -> Frames:
        name = self.name.encode()
        return [_LAYOUT.pack(_MAGIC, self.step, self.version, len(name), self.nonce, self.proof) + name]


def parse(frames: Frames) -> HandshakeMessage:
    """Read a message of the handshake.

    Raises:
        MalformedFrame: the packet is anything else.
    """
    if len(frames) != 1:
        raise MalformedFrame(f"a packet of {len(frames)} frames came where a handshake must be")
    data = bytes(frames[0][: LIMIT_BYTES + 1])
    if len(data) < _LAYOUT.size or len(data) > LIMIT_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise MalformedFrame(f"{memoryview(frames[0]).nbytes} bytes came that are no handshake of rlmesh")
    _, step, version, name_bytes, nonce, proof = _LAYOUT.unpack_from(data)
    if step not in (Step.HELLO, Step.CHALLENGE, Step.PROOF) or len(data) != _LAYOUT.size + name_bytes:
        raise MalformedFrame("a handshake message came whose step or length is wrong")
    try:
        name = data[_LAYOUT.size :].decode()
    except UnicodeDecodeError:
        raise MalformedFrame("a handshake message came whose name is not text") from None
    return HandshakeMessage(step, version, nonce, proof, name)


def scope_of(endpoint: str) -> str:
    """The part of an address that both sides see alike, so that a proof can include it: a Unix socket's real path.

    A TCP address may look different from outside; there the encryption binds both sides to each other.
    """
    scheme, _, path = endpoint.partition("://")
    if scheme in ("tcp", "plain"):
        return "tcp"
    return os.path.realpath(path) if path.startswith("/") else path


def _short(name: str) -> str:
    return name.encode()[:NAME_LIMIT_BYTES].decode(errors="ignore")


class CallerHandshake:
    """The caller's side of one handshake.

    Args:
        key: the job's key.
        name: the process that connects.
        endpoint: the address that it connects to.
    """

    def __init__(self, key: bytes, name: str, endpoint: str) -> None:
        self._key, self._endpoint = key, endpoint
        self.hello = HandshakeMessage(Step.HELLO, PROTOCOL_VERSION, make_nonce(), _EMPTY, _short(name))

    def answer(self, challenge: HandshakeMessage) -> HandshakeMessage:
        """The proof that answers a listener's challenge.

        Raises:
            MalformedFrame: the message is no challenge.
            AuthenticationFailed: the listener does not hold the job's key.
            VersionMismatch: the listener holds the key, but speaks another version.
        """
        if challenge.step != Step.CHALLENGE:
            raise MalformedFrame("the listener did not answer with a challenge")
        if not is_equal(challenge.proof, _proof(self._key, "listener", self.hello, challenge, self._endpoint)):
            raise AuthenticationFailed(
                f"the process that listens at {self._endpoint} does not hold the key of this job: the address belongs "
                "to another job, or the key file does"
            )
        if challenge.version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{challenge.name!r:.60} at {self._endpoint} speaks version {challenge.version} of the protocol, this "
                f"side {PROTOCOL_VERSION}: install the same version of rlmesh everywhere"
            )
        proof = _proof(self._key, "caller", self.hello, challenge, self._endpoint)
        return HandshakeMessage(Step.PROOF, PROTOCOL_VERSION, _EMPTY, proof, "")


class ListenerHandshake:
    """The listener's side of one handshake.

    Args:
        key: the job's key.
        name: the process that listens.
        endpoint: the listener's address.
        hello: the caller's first message.

    Raises:
        MalformedFrame: the first message is no hello.
    """

    def __init__(self, key: bytes, name: str, endpoint: str, hello: HandshakeMessage) -> None:
        if hello.step != Step.HELLO or hello.proof != _EMPTY:
            raise MalformedFrame("a handshake came that does not begin with a hello")
        self._key, self._hello, self._endpoint = key, hello, endpoint
        blank = HandshakeMessage(Step.CHALLENGE, PROTOCOL_VERSION, make_nonce(), _EMPTY, _short(name))
        self.challenge = blank._replace(proof=_proof(key, "listener", hello, blank, endpoint))

    def admit(self, proof: HandshakeMessage) -> str:
        """The caller's name, once its proof is checked.

        Raises:
            MalformedFrame: the message is no proof.
            AuthenticationFailed: the caller does not hold the job's key, or replays another handshake.
            VersionMismatch: the caller holds the key, but speaks another version; it finds that out by itself.
        """
        if proof.step != Step.PROOF or proof.nonce != _EMPTY or proof.name or proof.version != self._hello.version:
            raise MalformedFrame("a handshake came whose last message is no proof")
        name = self._hello.name
        if not is_equal(proof.proof, _proof(self._key, "caller", self._hello, self.challenge, self._endpoint)):
            raise AuthenticationFailed(f"{name!r:.60} does not hold the key of this job, or replays an old handshake")
        if self._hello.version != PROTOCOL_VERSION:
            raise VersionMismatch(f"{name!r:.60} speaks version {self._hello.version} of the protocol")
        return name


def _proof(key: bytes, side: Side, hello: HandshakeMessage, challenge: HandshakeMessage, endpoint: str) -> bytes:
    parts = [hello.nonce, challenge.nonce, struct.pack("<HH", hello.version, challenge.version)]
    for text in (hello.name, challenge.name, scope_of(endpoint)):
        data = text.encode()
        parts += [struct.pack("<I", len(data)), data]
    return keyed_hash(key, b"rlm-" + side.encode(), b"".join(parts))
