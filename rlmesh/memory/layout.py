"""What owner and borrower of a segment agree on: names, the table of slots, descriptors.

A segment is a file ``rlmesh-<job_id>-<owner>-<n>``. Its first bytes are a table with one entry per slot:
generation, offset, size. The owner writes an entry when it fills a slot and clears the generation before the slot's
memory is used for anything else; generations never repeat. A borrower first takes a shared lock on the byte of
the file that has the slot's index as its offset, then compares the generation. The owner clears a generation
only under an exclusive lock on that byte. So whoever holds the lock and has seen the right generation may read for as
long as it holds the lock, whatever became of the messages between the two, and the kernel drops the lock of a
process that dies. (The bytes are only names for the locks; nothing is read or written under them.)
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from rlmesh.errors import MalformedFrame
from rlmesh.memory.native import PAGE_BYTES

DIRECTORY = "/dev/shm"
MAGIC = int.from_bytes(b"rlmeshS1", "little")
ENTRY = struct.Struct("=4Q")
"""Generation, offset, size, unused. Entry 0 has the magic number, the segment's size and two zeros."""
ENTRY_WORDS = 4
TABLE_BYTES = 8 * PAGE_BYTES
MAX_SLOTS = TABLE_BYTES // ENTRY.size - 1
PART_ALIGNMENT = 64


class Descriptor(NamedTuple):
    """Where a buffer lies: bytes ``offset`` to ``offset + nbytes`` of a segment, inside the slot with that index."""

    segment: str
    slot: int
    generation: int
    offset: int
    nbytes: int

    @classmethod
    def parse(cls, fields: object) -> Descriptor:
        """From what came over the wire. Raises MalformedFrame."""
        if not isinstance(fields, list | tuple) or len(fields) != 5 or type(fields[0]) is not str:
            raise MalformedFrame("a descriptor of shared memory is not a name and four numbers")
        if any(type(value) is not int or not 0 <= value < 1 << 63 for value in fields[1:]):
            raise MalformedFrame(f"a descriptor of {fields[0]!r:.80} holds something other than sizes")
        return cls(*fields)


class LoanReturn(NamedTuple):
    """So many loans of a slot have ended at the borrower."""

    segment: str
    slot: int
    generation: int
    loans: int

    @classmethod
    def parse(cls, fields: object) -> LoanReturn:
        """From what came over the wire. Raises MalformedFrame."""
        if not isinstance(fields, list | tuple) or len(fields) != 4 or type(fields[0]) is not str:
            raise MalformedFrame("a give-back of shared memory is not a name and three numbers")
        if any(type(value) is not int or not 0 <= value < 1 << 63 for value in fields[1:]):
            raise MalformedFrame(f"a give-back of {fields[0]!r:.80} holds something other than numbers")
        return cls(*fields)


def segment_prefix(job_id: str, owner: str = "") -> str:
    """What the names of a job's segments begin with, or those of one owner.

    Raises:
        ValueError: for text that cannot be part of a file name.
    """
    for text in filter(None, (job_id, owner)):
        if re.fullmatch(r"[A-Za-z0-9._-]{1,100}", text) is None:
            raise ValueError(f"{text!r} cannot be part of a segment's name: use letters, digits, '.', '_' and '-'")
    return f"rlmesh-{job_id}-" + (f"{owner}-" if owner else "")


def owner_name(node_rank: int, name: str, pid: int, number: int = 0) -> str:
    """The owner in the names of a runtime's segments: by node and process they are found when it has died.

    Args:
        name: the runtime's, for people; what cannot be part of a file name is replaced.
        number: tells the runtimes of one process apart.
    """
    plain = re.sub("[^A-Za-z0-9_]", ".", name)[:60]
    return f"n{node_rank}-{plain}-{pid}-{number:x}"


def place(directory: str = DIRECTORY) -> str:
    """Text that is equal in two processes if segments of one can be opened by the other: same kernel, same file
    system (containers have their own), same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat(directory)
    return f"{boot}:{status.st_dev}:{status.st_ino}:{os.geteuid()}"


def remove_segments(job_id: str, owner: str, directory: str = DIRECTORY) -> int:
    """Unlink what an owner left that died. Views that others hold stay valid. Returns how many names went."""
    return _remove(re.compile(re.escape(segment_prefix(job_id, owner)) + "[0-9]+"), directory)


def remove_segments_of_process(job_id: str, node_rank: int, pid: int, directory: str = DIRECTORY) -> int:
    """Unlink what all runtimes of a process left that has died, whatever they were called (`owner_name`). Returns
    how many names went. Takes 0.2 s per GiB that nobody else has open."""
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
