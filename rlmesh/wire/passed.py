"""The payload of calls whose arguments are results of other calls. No I/O.

The payload of a call with ``Flag.PASSED`` is: the frames of the arguments, in which placeholders stand for the passed
values; the frames of the values that are sent along; and one more frame, a msgpack list with the number of the
arguments' frames and an entry per value (its number of frames, or a reference to its producer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgpack

from rlmesh.errors import MalformedFrame
from rlmesh.wire.envelope import Frames

WHOLE = -1


class ItemRange(NamedTuple):
    """The items of a value that are passed: all (``start`` is `WHOLE`), or ``start`` to ``stop`` of ``size``."""

    start: int = WHOLE
    stop: int = 0
    size: int = 0


class RemoteRef(NamedTuple):
    """A value that its producer stores: the producer's address, the value's token, and the items that are passed."""

    name: str
    endpoint: str
    incarnation: int
    token: int
    start: int
    stop: int
    size: int

    @property
    def part(self) -> ItemRange:
        return ItemRange(self.start, self.stop, self.size)


Value: TypeAlias = Frames | RemoteRef

_TYPES = (str, str, int, int, int, int, int)


def pack_passed(arguments: Frames, values: Sequence[Value]) -> Frames:
    """The payload of a call whose arguments hold ``values``."""
    entries: list[object] = []
    frames = list(arguments)
    for value in values:
        if isinstance(value, RemoteRef):
            entries.append(tuple(value))
        else:
            entries.append(len(value))
            frames += value
    frames.append(msgpack.packb((len(arguments), entries)))
    return frames


def unpack_passed(payload: Frames) -> tuple[Frames, list[Value]]:
    """The arguments' frames and the values.

    Raises:
        MalformedFrame: if anything is truncated, of the wrong type, or left over.
    """
    if not payload:
        raise MalformedFrame("a call with passed values has no payload")
    try:
        found = msgpack.unpackb(payload[-1], strict_map_key=True, use_list=False)
    except Exception as error:
        raise MalformedFrame(f"the list of passed values is not msgpack: {error}") from None
    if type(found) is not tuple or len(found) != 2 or type(found[0]) is not int or type(found[1]) is not tuple:
        raise MalformedFrame("the list of passed values has the wrong shape")
    used, entries = found
    if not 1 <= used < len(payload):
        raise MalformedFrame(f"a call claims {used} frames of arguments, but has {len(payload) - 1}")
    arguments = list(payload[:used])
    values: list[Value] = []
    for entry in entries:
        if type(entry) is int:
            if not 1 <= entry <= len(payload) - 1 - used:
                raise MalformedFrame(f"a passed value claims {entry} frames, but {len(payload) - 1 - used} are left")
            values.append(list(payload[used : used + entry]))
            used += entry
        elif type(entry) is tuple and tuple(map(type, entry)) == _TYPES:
            values.append(RemoteRef(*entry))
        else:
            raise MalformedFrame("a passed value has fields of the wrong number or type")
    if used != len(payload) - 1:
        raise MalformedFrame(f"{len(payload) - 1 - used} frames belong to no passed value")
    return arguments, values
