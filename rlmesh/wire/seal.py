"""Seals for a connection that is not encrypted: nobody on its path can add, change, repeat or leave out a packet.

Each packet gets one more frame, a keyed hash (HMAC-SHA-256) over its number, the lengths of its frames and their
bytes. The key belongs to one direction of one connection: it is derived from the job's key and from a token that is
used once. Pure: bytes in, values out.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal

from rlmesh.errors import AuthenticationFailed
from rlmesh.wire.envelope import Frames

TAG_BYTES = 32

Side = Literal["caller", "listener"]


class Seal:
    """One direction of a connection.

    Args:
        key: the job's.
        token: of this connection alone.
        sender: the side whose packets these are.
    """

    def __init__(self, key: bytes, token: str, sender: Side) -> None:
        person = b"rlm-lane-" + sender[:6].encode()
        self._key = hashlib.blake2b(token.encode(), key=key, digest_size=32, person=person).digest()
        self._count = 0

    def close(self, frames: Frames) -> Frames:
        """The next packet, sealed."""
        return [*frames, self._tag(frames)]

    def open(self, frames: Frames) -> Frames:
        """The next packet's frames.

        Raises:
            AuthenticationFailed: the packet is not the next one that the peer sent.
        """
        if len(frames) < 2 or len(frames[-1]) != TAG_BYTES:
            raise AuthenticationFailed("a packet without a seal came over an unencrypted connection")
        inner = frames[:-1]
        if not hmac.compare_digest(bytes(frames[-1]), self._tag(inner)):
            raise AuthenticationFailed(
                "a packet came over an unencrypted connection that its peer did not send, or not in this place: "
                "somebody on the network may be adding or changing bytes"
            )
        return inner

    def _tag(self, frames: Frames) -> bytes:
        sizes = [memoryview(frame).nbytes for frame in frames]
        digest = hmac.new(self._key, struct.pack(f"<Q{len(sizes)}Q", self._count, *sizes), hashlib.sha256)
        for frame in frames:
            digest.update(frame)
        self._count += 1
        return digest.digest()
