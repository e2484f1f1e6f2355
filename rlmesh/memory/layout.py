"""The format of segments, on which owners and borrowers agree: names, the table of slots, descriptors.

A segment is a file ``rlmesh-<job_id>-<owner>-<n>``. Its first bytes are a table with one entry per slot:
generation, offset, size. The owner writes an entry when it fills a slot and clears the generation before the slot's
memory is used for anything else; generations never repeat. A borrower first takes a shared lock on the byte of
the file that has the slot's index as its offset, then compares the generation. The owner clears a generation
only under an exclusive lock on that byte. So a process that holds the lock and has seen the right generation may read
for as long as it holds the lock, even if messages between the two are lost, and the kernel drops the lock of a process
that dies. (The bytes only name the locks; the locks do not protect the bytes themselves.)
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

from rlmesh.errors import MalformedFrame
from rlmesh.memory.native import PAGE_BYTES

DIRECTORY = "/dev/shm"
MAGIC = int.from_bytes(b"rlmeshS1", "little")
ENTRY = struct.Struct("=4Q")
"""A table entry: generation, offset, size, unused. Entry 0 has the magic number, the segment's size and two zeros."""
ENTRY_WORDS = 4
TABLE_BYTES = 8 * PAGE_BYTES
MAX_SLOTS = TABLE_BYTES // ENTRY.size - 1
PART_ALIGNMENT = 64


class Descriptor(NamedTuple):
    """The place of a buffer: bytes ``offset`` to ``offset + nbytes`` of a segment, inside the slot with that index."""

    segment: str
    slot: int
    generation: int
    offset: int
    nbytes: int

    @classmethod
    def parse(cls, fields: object) -> Descriptor:
        """A descriptor from fields of a message. Raises MalformedFrame."""
        return cls(*_checked(fields, len(cls._fields), "descriptor"))


class SlotRelease(NamedTuple):
    """A borrower's message that ``refs`` references to a slot have ended."""

    segment: str
    slot: int
    generation: int
    refs: int

    @classmethod
    def parse(cls, fields: object) -> SlotRelease:
        """A release from fields of a message. Raises MalformedFrame."""
        return cls(*_checked(fields, len(cls._fields), "release"))


def _checked(fields: object, count: int, what: str) -> Any:
    if not isinstance(fields, list | tuple) or len(fields) != count or type(fields[0]) is not str:
        raise MalformedFrame(f"a {what} of shared memory is not a name and {count - 1} numbers")
    for value in fields[1:]:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise MalformedFrame(f"a {what} of {fields[0]!r:.80} holds something other than sizes and numbers")
    return fields


class RefCounts(dict[Hashable, int]):
    """The number of references to a slot, by receiver."""

    def add(self, receiver: Hashable) -> None:
        self[receiver] = self.get(receiver, 0) + 1

    def release(self, receiver: Hashable, refs: int) -> bool:
        """End references of a receiver; True if they were its last ones, False also if it has none."""
        if receiver not in self:
            return False
        self[receiver] -= refs
        if self[receiver] > 0:
            return False
        del self[receiver]
        return True


def segment_prefix(job_id: str, owner: str = "") -> str:
    """The prefix of the names of a job's segments, or of one owner's segments.

    Raises:
        ValueError: for text that cannot be part of a file name.
    """
    for text in filter(None, (job_id, owner)):
        if re.fullmatch(r"[A-Za-z0-9._-]{1,100}", text) is None:
            raise ValueError(f"{text!r} cannot be part of a segment's name: use letters, digits, '.', '_' and '-'")
    return f"rlmesh-{job_id}-" + (f"{owner}-" if owner else "")


def owner_name(node_rank: int, name: str, pid: int, number: int = 0) -> str:
    """The owner part of the names of a runtime's segments, by which they are found when its process has died.

    Args:
        name: the runtime's name, for people; characters that cannot be part of a file name are replaced.
        number: distinguishes the runtimes of one process.
    """
    plain = re.sub("[^A-Za-z0-9_]", ".", name)[:60]
    return f"n{node_rank}-{plain}-{pid}-{number:x}"


def place(directory: str = DIRECTORY) -> str:
    """A text that is equal in two processes if each can open the other's segments: same kernel, same file system
    (containers have their own), same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat(directory)
    return f"{boot}:{status.st_dev}:{status.st_ino}:{os.geteuid()}"


def remove_segments(job_id: str, owner: str, directory: str = DIRECTORY) -> int:
    """Unlink the segments of an owner that died, and return their number; views in other processes stay valid."""
    return _remove(re.compile(re.escape(segment_prefix(job_id, owner)) + "[0-9]+"), directory)


def remove_segments_of_process(job_id: str, node_rank: int, pid: int, directory: str = DIRECTORY) -> int:
    """Unlink the segments of all runtimes of a process that died (`owner_name`), and return their number.

    Takes 0.2 s per GiB that no other process has open.
    """
    owner = rf"n{node_rank}-[A-Za-z0-9._]*-{pid}-[0-9a-f]+"
    return _remove(re.compile(re.escape(segment_prefix(job_id)) + owner + "-[0-9]+"), directory)


def _remove(pattern: re.Pattern[str], directory: str) -> int:
    removed = 0
    for name in os.listdir(directory):
        if pattern.fullmatch(name):
            try:
                os.unlink(os.path.join(directory, name))
                removed += 1
            except FileNotFoundError:
                continue
    return removed
