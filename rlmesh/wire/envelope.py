"""Envelopes: the headers of messages, and the packets that carry messages with their payloads.

A *packet* is the unit that a transport sends: a list of frames. Frame 0 is a msgpack list of headers; the payload
frames of all headers follow in the order of the headers. Messages that are ready in one turn of the loop travel in
one packet; each header says how many frames are its own, so that one bad message fails alone.

No I/O. Malformed input raises `MalformedFrame` and no other exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, get_origin, get_type_hints

import msgpack

from rlmesh.errors import MalformedFrame

PROTOCOL_VERSION = 2

Buffer: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = list[Buffer]

ANY_INCARNATION = -1


class Flag(IntEnum):
    """The bits of ``Call.flags``. A stream's flags also hold its window: ``STREAM | window << WINDOW_SHIFT``."""

    NO_REPLY = 1
    STREAM = 2
    PASSED = 4
    KEEP = 8


WINDOW_SHIFT = 8


class Call(NamedTuple):
    """A call of a method.

    ``timeout_s`` is the time left until the caller's deadline, since clocks of two hosts differ. ``chain`` names the
    serial slots that are held by the calls that led to this call.
    """

    call_id: int
    target: str
    incarnation: int
    method: str
    timeout_s: float
    flags: int
    chain: tuple[str, ...]


class Reply(NamedTuple):
    """The result of a call (``ok``) or its failure, with the callee's times in nanoseconds."""

    call_id: int
    ok: bool
    executed_ns: int
    queued_ns: int
    run_queue_ns: int


class Cancel(NamedTuple):
    call_id: int


class Item(NamedTuple):
    """An item of the stream that the call asked for, numbered from 0; a `Reply` with their count ends the stream."""

    call_id: int
    number: int


class Credit(NamedTuple):
    """The consumer of a stream took ``items``, so that the producer may send as many more."""

    call_id: int
    items: int


class Keep(NamedTuple):
    """A request that the callee stores the result of a running call, unless it is small, until it is fetched.

    A call that is not sent yet carries ``Flag.KEEP`` instead.
    """

    call_id: int


class StoredReply(NamedTuple):
    """A reply whose result is stored at the callee under ``token``; times as in `Reply`."""

    call_id: int
    token: int
    nbytes: int
    executed_ns: int
    queued_ns: int
    run_queue_ns: int


class Release(NamedTuple):
    """The caller no longer needs a stored result."""

    token: int


class Concurrency(NamedTuple):
    """A method of the sender runs ``calls`` calls at once, so that the peer may have as many in flight to it."""

    calls: int


class TakenReplies(NamedTuple):
    """The number of large replies that the sender has received so far on this connection.

    See `rlmesh.runtime.serving.reply_backlog`.
    """

    total: int


class ShmPlace(NamedTuple):
    """The place of the sender's shared memory, which peers with an equal ``place`` can open."""

    place: str


class SlotReleases(NamedTuple):
    """References to slots of shared memory that have ended: segment, slot, generation and count of each."""

    items: tuple[tuple[str, int, int, int], ...]


class BufferRef(NamedTuple):
    """The place of a frame in shared memory, sent instead of the frame."""

    segment: str
    slot: int
    generation: int
    offset: int
    nbytes: int


class BulkOffer(NamedTuple):
    """The callee accepts a second connection for large payloads at ``port`` (0: at the same address)."""

    token: str
    port: int


class OpenBulk(NamedTuple):
    """The callee has a large payload to send and asks the caller to open the second connection."""


class Detached(NamedTuple):
    """The header of a message whose payload comes over the second connection, as payload ``number``."""

    number: int
    kind: int
    fields: tuple[Any, ...]


class Bulk(NamedTuple):
    """Payload ``number``: frames of these sizes, in this packet or in the parts that follow."""

    number: int
    sizes: tuple[int, ...]


class BulkPart(NamedTuple):
    """The next bytes of payload ``number``; a part has bytes of one frame only."""

    number: int


BulkHeader: TypeAlias = BulkOffer | OpenBulk | Detached | Bulk | BulkPart
Header: TypeAlias = (
    Call
    | Reply
    | Cancel
    | Item
    | Credit
    | Keep
    | StoredReply
    | Release
    | Concurrency
    | TakenReplies
    | ShmPlace
    | SlotReleases
    | BulkHeader
)
Message: TypeAlias = tuple[Header, Frames]
MakeRef: TypeAlias = Callable[[memoryview], BufferRef | None]
OpenRefs: TypeAlias = Callable[[list[Buffer | BufferRef]], Frames]

_HEADERS: dict[int, type[Any]] = {
    4: Call, 5: Reply, 6: Cancel, 7: Item, 8: Credit, 9: ShmPlace, 10: SlotReleases, 11: Keep, 12: StoredReply,
    13: Release, 14: Concurrency, 15: TakenReplies, 20: BulkOffer, 21: OpenBulk, 22: Detached, 23: Bulk, 24: BulkPart,
}  # fmt: skip
"""The headers by their numbers on the wire."""
_SHAPES = {
    kind: (cls, tuple(get_origin(hint) or hint for hint in get_type_hints(cls).values()))
    for kind, cls in _HEADERS.items()
}
"""The classes of the headers and the types of their fields, by their numbers."""
_KIND_OF = {cls: kind for kind, cls in _HEADERS.items()}
_REF_TYPES = (int, str, int, int, int, int)


def pack(messages: Sequence[Message], make_ref: MakeRef | None = None) -> Frames:
    """Join messages into the frames of one packet.

    Args:
        make_ref: returns the reference to send instead of a frame; None: send the frame itself.
    """
    headers: list[tuple[Any, ...]] = []
    frames: Frames = [b""]
    for header, payload in messages:
        refs = []
        if make_ref is not None and len(payload) > 1:
            inline: Frames = []
            for position, frame in enumerate(payload):
                ref = make_ref(frame) if type(frame) is memoryview else None
                if ref is None:
                    inline.append(frame)
                else:
                    refs.append((position, *ref))
            payload = inline
        frames += payload
        if refs:
            headers.append((_KIND_OF[type(header)], len(payload), header, refs))
        else:
            headers.append((_KIND_OF[type(header)], len(payload), header))
    frames[0] = msgpack.Packer().pack(headers)  # As `msgpack.packb`, without a function of Python.
    return frames


def unpack(frames: Sequence[Buffer], open_refs: OpenRefs | None = None) -> list[Message]:
    """Split a packet into its messages.

    Args:
        open_refs: returns a payload's frames with the referenced frames in place of the references.

    Raises:
        MalformedFrame: if anything is truncated, of the wrong type, or left over.
    """
    if not frames:
        raise MalformedFrame("an empty packet arrived; the peer does not speak rlmesh's protocol")
    try:
        headers = msgpack.unpackb(frames[0], strict_map_key=True, use_list=False)
    except Exception as error:
        raise MalformedFrame(f"the header frame ({len(frames[0])} bytes) is not msgpack: {error}") from None
    if type(headers) is not tuple:
        raise MalformedFrame(f"the header frame holds {type(headers).__name__}, not a list of headers")
    messages: list[Message] = []
    used = 1
    for entry in headers:
        header, count = _parse(entry)
        end = used + count
        if end > len(frames):
            raise MalformedFrame(
                f"a {type(header).__name__} claims {count} payload frames, but only {len(frames) - used} are left"
            )
        payload = list(frames[used:end])
        used = end
        if len(entry) == 4:
            if open_refs is None:
                raise MalformedFrame(f"a {type(header).__name__} refers to shared memory that this peer does not share")
            payload = open_refs(_with_refs(payload, entry[3]))
        messages.append((header, payload))
    if used != len(frames):
        raise MalformedFrame(f"{len(frames) - used} frames belong to no message")
    return messages


def detach(header: Header, number: int) -> Detached:
    """The message to send instead of a message whose payload goes over the second connection."""
    return Detached(number, _KIND_OF[type(header)], tuple(header))


def reattach(message: Detached) -> Header:
    """The header of a detached message.

    Raises:
        MalformedFrame: a message of its kind has no payload.
    """
    header, _ = _parse((message.kind, 0, message.fields))
    if type(header) not in (Call, Reply, Item):
        raise MalformedFrame(f"a {type(header).__name__} came detached, but has no payload")
    return header


def _with_refs(payload: Frames, refs: object) -> list[Buffer | BufferRef]:
    whole: list[Buffer | BufferRef] = list(payload)
    if type(refs) is not tuple:
        raise MalformedFrame("a header's buffer references are not a list")
    for ref in refs:
        if type(ref) is not tuple or tuple(map(type, ref)) != _REF_TYPES or not 0 <= ref[0] <= len(whole):
            raise MalformedFrame("a buffer reference is not a position, a segment and four numbers")
        whole.insert(ref[0], BufferRef(*ref[1:]))
    return whole


def _parse(entry: object) -> tuple[Header, int]:
    if type(entry) is not tuple or not 3 <= len(entry) <= 4:
        raise MalformedFrame("a header is not a list of kind, frame count, fields and perhaps buffer references")
    kind, count, values = entry[:3]
    shape = _SHAPES.get(kind) if type(kind) is int else None
    if shape is None:
        raise MalformedFrame(f"unknown kind of message: {kind!r:.40}")
    cls, types = shape
    if type(count) is not int or count < 0:
        raise MalformedFrame(f"a {cls.__name__} has no valid frame count")
    if type(values) is not tuple or tuple(map(type, values)) != types:
        raise MalformedFrame(f"a {cls.__name__} has fields of the wrong number or type")
    if cls is Call and values[-1] and any(type(slot) is not str for slot in values[-1]):
        raise MalformedFrame("a Call's chain holds something other than text")
    header: Header = tuple.__new__(cls, values)
    return header, count
