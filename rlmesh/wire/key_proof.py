"""Keyed hashes that prove knowledge of a shared secret: nonces, proofs, derived keys, tags of messages.

The runtime's handshake, the sealed packets of unencrypted connections and the byte streams of weight sync use them.
The labels keep the uses apart: a hash that serves as one proof is worth nothing as another. No I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Literal

from rlmesh.errors import AuthenticationFailed
from rlmesh.wire.envelope import Frames

KEY_BYTES = 32
NONCE_BYTES = 32
HASH_BYTES = 32

Side = Literal["caller", "listener"]


def make_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def keyed_hash(key: bytes, label: bytes, data: bytes = b"") -> bytes:
    """A proof of the key over ``data``, or a key derived from it (BLAKE2b, 32 bytes).

    Args:
        key: the shared secret, at most 64 bytes.
        label: at most 16 bytes; hashes with different labels are independent of each other.
    """
    return hashlib.blake2b(data, key=key, digest_size=HASH_BYTES, person=label).digest()


def is_equal(received: bytes | bytearray, expected: bytes) -> bool:
    """True if two hashes are equal; takes the same time for any received hash of the right length."""
    return hmac.compare_digest(received, expected)


class MessageTags:
    """Tags (HMAC-SHA-256) of the numbered messages in one direction of one connection.

    Args:
        key: of this direction of this connection alone.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def begin(self, header: bytes = b"") -> hmac.HMAC:
        """The hash of the next message's number and header, to which the caller adds the message's bytes."""
        digest = hmac.new(self._key, struct.pack("<Q", self._count) + header, hashlib.sha256)
        self._count += 1
        return digest


class Seal:
    """Seals the packets of one direction of an unencrypted connection: none can be added, changed, repeated or dropped.

    Each packet gets one more frame, the tag of its number, of the lengths of its frames and of their bytes.

    Args:
        key: the job's key.
        token: a text that only this connection uses.
        sender: the side that sends these packets.
    """

    def __init__(self, key: bytes, token: str, sender: Side) -> None:
        self._tags = MessageTags(keyed_hash(key, b"rlm-lane-" + sender[:6].encode(), token.encode()))

    def close(self, frames: Frames) -> Frames:
        """Seal the next packet."""
        return [*frames, self._tag(frames)]

    def open(self, frames: Frames) -> Frames:
        """Check the next packet and return its frames without the seal.

        Raises:
            AuthenticationFailed: the packet is not the next one that the peer sent.
        """
        if len(frames) < 2 or len(frames[-1]) != HASH_BYTES:
            raise AuthenticationFailed("a packet without a seal came over an unencrypted connection")
        inner = frames[:-1]
        if not is_equal(bytes(frames[-1]), self._tag(inner)):
            raise AuthenticationFailed(
                "a packet that came over an unencrypted connection is not the next one that its peer sent: somebody on "
                "the network may be adding or changing bytes"
            )
        return inner

    def _tag(self, frames: Frames) -> bytes:
        sizes = [memoryview(frame).nbytes for frame in frames]
        tag = self._tags.begin(struct.pack(f"<{len(sizes)}Q", *sizes))
        for frame in frames:
            tag.update(frame)
        return tag.digest()
