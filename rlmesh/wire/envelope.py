"""Envelopes: who calls what, and which of the packet's frames belong to it.

A *packet* is what a transport sends as one unit: a list of frames. Frame 0 is a msgpack list of headers; the
payload frames of all headers follow in the order of the headers. Messages that are ready in one turn of the
loop travel in one packet; each header says how many frames are its own, so one bad message fails alone.

Pure: bytes in, values out. Everything that does not fit raises `MalformedFrame`, never anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import msgpack

from rlmesh.errors import MalformedFrame

PROTOCOL_VERSION = 2

Buffer: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = list[Buffer]

ANY_INCARNATION = -1


class Kind(IntEnum):
    CALL = 4
    REPLY = 5
    CANCEL = 6
    ITEM = 7
    CREDIT = 8
    SHARES = 9
    GIVE_BACKS = 10
    KEEP = 11
    KEPT = 12
    RELEASE = 13
    ROOM = 14
    TAKEN = 15
    LANE_OFFER = 20
    OPEN_LANE = 21
    DETACHED = 22
    BULK = 23
    PART = 24


class Flag(IntEnum):
    """What ``Call.flags`` may hold. The rest of a stream's flags is its window: ``STREAM | window << WINDOW_SHIFT``."""

    NO_REPLY = 1
    STREAM = 2
    PASSED = 4
    KEEP = 8


WINDOW_SHIFT = 8


class Call(NamedTuple):
    """``timeout_s`` is what is left of the caller's deadline, since clocks of two hosts differ.

    ``chain`` names the serial slots that are held by the calls that led to this one.
    """

    call_id: int
    target: str
    incarnation: int
    method: str
    timeout_s: float
    flags: int
    chain: tuple[str, ...]


class Reply(NamedTuple):
    """``ok`` or a failure; where the callee's time went, in nanoseconds."""

    call_id: int
    ok: bool
    executed_ns: int
    queued_ns: int
    run_queue_ns: int


class Cancel(NamedTuple):
    call_id: int


class Item(NamedTuple):
    """One item of the stream that the call asked for, from 0 on; a `Reply` with their number ends the stream."""

    call_id: int
    number: int


class Credit(NamedTuple):
    """The consumer of a stream took items: as many more may be sent."""

    call_id: int
    items: int


class Keep(NamedTuple):
    """The result of a call, unless it is small, shall stay at the callee until it is fetched. Before a call was sent,
    ``Flag.KEEP`` says so."""

    call_id: int


class StoredReply(NamedTuple):
    """Instead of a `Reply`: the result stays at the callee under ``token``; times as in `Reply`."""

    call_id: int
    token: int
    nbytes: int
    executed_ns: int
    queued_ns: int
    run_queue_ns: int


class Release(NamedTuple):
    """A kept result is no longer needed."""

    token: int


class Concurrency(NamedTuple):
    """A method of the sender runs so many calls at once: as many more may be on their way to it."""

    calls: int


class TakenReplies(NamedTuple):
    """The number of large replies that the sender has taken in so far on this connection.

    See `rlmesh.runtime.serving.reply_backlog`.
    """

    total: int


class Shares(NamedTuple):
    """Where the sender's shared memory lies: a peer with the same ``place`` can open it."""

    place: str


class GiveBacks(NamedTuple):
    """Loans that have ended: for each slot its segment, number, generation, and how many."""

    items: tuple[tuple[str, int, int, int], ...]


class BufferRef(NamedTuple):
    """In the place of a frame: where in shared memory it lies."""

    segment: str
    slot: int
    generation: int
    offset: int
    nbytes: int


class LaneOffer(NamedTuple):
    """Whoever was called takes large payloads over a second connection, at ``port`` (0: at the same address)."""

    token: str
    port: int


class OpenLane(NamedTuple):
    """Whoever was called has a large payload to send: open the second connection."""


class Detached(NamedTuple):
    """A message of another kind whose payload comes over the second connection, under ``number``."""

    number: int
    kind: int
    fields: tuple[Any, ...]


class Bulk(NamedTuple):
    """The payload ``number``: frames of these sizes, here or in the parts that follow."""

    number: int
    sizes: tuple[int, ...]


class BulkPart(NamedTuple):
    """The next bytes of payload ``number``; none has bytes of two frames."""

    number: int


LaneHeader: TypeAlias = LaneOffer | OpenLane | Detached | Bulk | BulkPart
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
    | Shares
    | GiveBacks
    | LaneHeader
)
Message: TypeAlias = tuple[Header, Frames]
Lend: TypeAlias = Callable[[memoryview], BufferRef | None]
Borrow: TypeAlias = Callable[[list[Buffer | BufferRef]], Frames]

_KIND_OF: dict[type[Any], int] = {
    Call: int(Kind.CALL),
    Reply: int(Kind.REPLY),
    Cancel: int(Kind.CANCEL),
    Item: int(Kind.ITEM),
    Credit: int(Kind.CREDIT),
    Keep: int(Kind.KEEP),
    StoredReply: int(Kind.KEPT),
    Release: int(Kind.RELEASE),
    Concurrency: int(Kind.ROOM),
    TakenReplies: int(Kind.TAKEN),
    Shares: int(Kind.SHARES),
    GiveBacks: int(Kind.GIVE_BACKS),
    LaneOffer: int(Kind.LANE_OFFER),
    OpenLane: int(Kind.OPEN_LANE),
    Detached: int(Kind.DETACHED),
    Bulk: int(Kind.BULK),
    BulkPart: int(Kind.PART),
}
_SHAPES: dict[int, tuple[type[Any], tuple[type[Any], ...]]] = {
    Kind.CALL: (Call, (int, str, int, str, float, int, tuple)),
    Kind.REPLY: (Reply, (int, bool, int, int, int)),
    Kind.CANCEL: (Cancel, (int,)),
    Kind.ITEM: (Item, (int, int)),
    Kind.CREDIT: (Credit, (int, int)),
    Kind.KEEP: (Keep, (int,)),
    Kind.KEPT: (StoredReply, (int, int, int, int, int, int)),
    Kind.RELEASE: (Release, (int,)),
    Kind.ROOM: (Concurrency, (int,)),
    Kind.TAKEN: (TakenReplies, (int,)),
    Kind.SHARES: (Shares, (str,)),
    Kind.GIVE_BACKS: (GiveBacks, (tuple,)),
    Kind.LANE_OFFER: (LaneOffer, (str, int)),
    Kind.OPEN_LANE: (OpenLane, ()),
    Kind.DETACHED: (Detached, (int, int, tuple)),
    Kind.BULK: (Bulk, (int, tuple)),
    Kind.PART: (BulkPart, (int,)),
}


_LOAN_TYPES = (int, str, int, int, int, int)


def pack(messages: Sequence[Message], lend: Lend | None = None) -> Frames:
    """Join messages into the frames of one packet; frames that ``lend`` takes are only named."""
    headers: list[tuple[Any, ...]] = []
    frames: Frames = [b""]
    for header, payload in messages:
        loans = []
        if lend is not None and len(payload) > 1:
            kept: Frames = []
            for position, frame in enumerate(payload):
                loan = lend(frame) if type(frame) is memoryview else None
                if loan is None:
                    kept.append(frame)
                else:
                    loans.append((position, *loan))
            payload = kept
        frames += payload
        if loans:
            headers.append((_KIND_OF[type(header)], len(payload), header, loans))
        else:
            headers.append((_KIND_OF[type(header)], len(payload), header))
    frames[0] = msgpack.packb(headers)
    return frames


def unpack(frames: Sequence[Buffer], borrow: Borrow | None = None) -> list[Message]:
    """Split a packet into its messages; ``borrow`` fetches what was lent.

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
            if borrow is None:
                raise MalformedFrame(f"a {type(header).__name__} lends shared memory to a peer that shares none")
            payload = borrow(_with_loans(payload, entry[3]))
        messages.append((header, payload))
    if used != len(frames):
        raise MalformedFrame(f"{len(frames) - used} frames belong to no message")
    return messages


def detach(header: Header, number: int) -> Detached:
    """What is sent in the place of a message whose payload goes another way."""
    return Detached(number, _KIND_OF[type(header)], tuple(header))


def reattach(message: Detached) -> Header:
    """The header of the message.

    Raises:
        MalformedFrame: it is none that has a payload.
    """
    header, _ = _parse((message.kind, 0, message.fields))
    if type(header) not in (Call, Reply, Item):
        raise MalformedFrame(f"a {type(header).__name__} came detached, but has no payload")
    return header


def _with_loans(payload: Frames, loans: object) -> list[Buffer | BufferRef]:
    whole: list[Buffer | BufferRef] = list(payload)
    if type(loans) is not tuple:
        raise MalformedFrame("a header's loans are not a list")
    for loan in loans:
        if type(loan) is not tuple or tuple(map(type, loan)) != _LOAN_TYPES or not 0 <= loan[0] <= len(whole):
            raise MalformedFrame("a loan is not a position, a segment and four numbers")
        whole.insert(loan[0], BufferRef(*loan[1:]))
    return whole


def _parse(entry: object) -> tuple[Header, int]:
    if type(entry) is not tuple or not 3 <= len(entry) <= 4:
        raise MalformedFrame("a header is not a list of kind, frame count, fields and perhaps loans")
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
