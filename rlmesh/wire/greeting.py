"""The greeting: two processes prove to each other that they hold the job's key, before anything else is read.

::

    caller                                     listener
      HELLO      version, nonce, name     →
                                          ←    CHALLENGE  version, nonce, proof, name
      PROOF      proof                    →

A proof is a keyed hash over both sides' nonces, versions and names and the address, with a label for the side
that gives it. Both nonces are new in each greeting, so that a recorded one proves nothing; the label keeps one
side's proof from serving as the other's. The caller sends nothing but its hello before the listener has proved
itself, so that a stranger at a job's old address learns nothing.

Each message is one packet of one frame with the same fixed layout in every version of the protocol; it is read
by position, with no decoder. Pure: bytes in, values out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from enum import IntEnum
from typing import NamedTuple

from rlmesh.errors import AuthenticationFailed, MalformedFrame, VersionMismatch
from rlmesh.wire.envelope import PROTOCOL_VERSION, Frames

KEY_BYTES = 32
NONCE_BYTES = 32
NAME_LIMIT_BYTES = 256

_MAGIC = b"RLMG"
_LAYOUT = struct.Struct(f"<4sBHH{NONCE_BYTES}s32s")
LIMIT_BYTES = _LAYOUT.size + NAME_LIMIT_BYTES
"""No packet of a greeting is larger."""
_NOTHING = bytes(32)


class Step(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3


class Greeting(NamedTuple):
    """One of the three messages; what a step does not need is zero or empty."""

    step: int
    version: int
    nonce: bytes
    proof: bytes
    name: str

    def pack(self) -> Frames:
        name = self.name.encode()
        return [_LAYOUT.pack(_MAGIC, self.step, self.version, len(name), self.nonce, self.proof) + name]


def parse(frames: Frames) -> Greeting:
    """Read a greeting.

    Raises:
        MalformedFrame: the packet is anything else.
    """
    if len(frames) != 1:
        raise MalformedFrame(f"a packet of {len(frames)} frames came where a greeting must be")
    data = bytes(frames[0][: LIMIT_BYTES + 1])
    if len(data) < _LAYOUT.size or len(data) > LIMIT_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise MalformedFrame(f"{memoryview(frames[0]).nbytes} bytes came that are no greeting of rlmesh")
    _, step, version, name_bytes, nonce, proof = _LAYOUT.unpack_from(data)
    if step not in (Step.HELLO, Step.CHALLENGE, Step.PROOF) or len(data) != _LAYOUT.size + name_bytes:
        raise MalformedFrame("a greeting came whose step or length is wrong")
    try:
        name = data[_LAYOUT.size :].decode()
    except UnicodeDecodeError:
        raise MalformedFrame("a greeting came whose name is not text") from None
    return Greeting(step, version, nonce, proof, name)


def scope_of(endpoint: str) -> str:
    """What of an address both sides know alike, and so can prove: the socket's real path. A TCP address may look
    different from outside; there the encryption binds both sides."""
    scheme, _, path = endpoint.partition("://")
    if scheme in ("tcp", "plain"):
        return "tcp"
    return os.path.realpath(path) if path.startswith("/") else path


def _short(name: str) -> str:
    return name.encode()[:NAME_LIMIT_BYTES].decode(errors="ignore")


class Opening:
    """The caller's side.

    Args:
        key: the job's.
        name: of the process that connects.
        endpoint: the address that it connects to.
    """

    def __init__(self, key: bytes, name: str, endpoint: str) -> None:
        self._key, self._endpoint = key, endpoint
        self.hello = Greeting(Step.HELLO, PROTOCOL_VERSION, secrets.token_bytes(NONCE_BYTES), _NOTHING, _short(name))

    def answer(self, challenge: Greeting) -> Greeting:
        """The proof that answers a listener's challenge.

        Raises:
            MalformedFrame: it is no challenge.
            AuthenticationFailed: the listener does not hold the job's key.
            VersionMismatch: it does, but speaks another version.
        """
        if challenge.step != Step.CHALLENGE:
            raise MalformedFrame("the listener did not answer with a challenge")
        if not hmac.compare_digest(challenge.proof, self._proof(b"listener", challenge)):
            raise AuthenticationFailed(
                f"whoever listens at {self._endpoint} does not hold the key of this job: the address belongs to "
                "another job, or the key file does"
            )
        if challenge.version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{challenge.name!r:.60} at {self._endpoint} speaks version {challenge.version} of the protocol, this "
                f"side {PROTOCOL_VERSION}: install the same version of rlmesh everywhere"
            )
        return Greeting(Step.PROOF, PROTOCOL_VERSION, _NOTHING, self._proof(b"caller", challenge), "")

    def _proof(self, side: bytes, challenge: Greeting) -> bytes:
        return _proof(self._key, side, self.hello, challenge, self._endpoint)


class Admission:
    """The listener's side of one greeting.

    Args:
        key: the job's.
        name: of the process that listens.
        endpoint: its address.
        hello: what came.

    Raises:
        MalformedFrame: it is no hello.
    """

    def __init__(self, key: bytes, name: str, endpoint: str, hello: Greeting) -> None:
        if hello.step != Step.HELLO or hello.proof != _NOTHING:
            raise MalformedFrame("a greeting came that does not begin with a hello")
        self._key, self._hello, self._endpoint = key, hello, endpoint
        blank = Greeting(Step.CHALLENGE, PROTOCOL_VERSION, secrets.token_bytes(NONCE_BYTES), _NOTHING, _short(name))
        self.challenge = blank._replace(proof=_proof(key, b"listener", hello, blank, endpoint))

    def admit(self, proof: Greeting) -> str:
        """The caller's name.

        Raises:
            MalformedFrame: it is no proof.
            AuthenticationFailed: the caller does not hold the job's key, or replays what another one said.
            VersionMismatch: it does, but speaks another version; it will find that out by itself.
        """
        if proof.step != Step.PROOF or proof.nonce != _NOTHING or proof.name or proof.version != self._hello.version:
            raise MalformedFrame("a greeting came whose last step is no proof")
        wanted = _proof(self._key, b"caller", self._hello, self.challenge, self._endpoint)
        name = self._hello.name
        if not hmac.compare_digest(proof.proof, wanted):
            raise AuthenticationFailed(f"{name!r:.60} does not hold the key of this job, or replays an old greeting")
        if self._hello.version != PROTOCOL_VERSION:
            raise VersionMismatch(f"{name!r:.60} speaks version {self._hello.version} of the protocol")
        return name


def _proof(key: bytes, side: bytes, hello: Greeting, challenge: Greeting, endpoint: str) -> bytes:
    parts = [hello.nonce, challenge.nonce, struct.pack("<HH", hello.version, challenge.version)]
    for text in (hello.name, challenge.name, scope_of(endpoint)):
        data = text.encode()
        parts += [struct.pack("<I", len(data)), data]
    return hashlib.blake2b(b"".join(parts), key=key, digest_size=32, person=b"rlm-" + side).digest()
