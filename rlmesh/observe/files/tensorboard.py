"""TensorBoard event files with scalars, written without TensorBoard.

TensorBoard's own writer imports NumPy, protobuf and, if installed, all of TensorFlow, and starts a
thread: too much for the process that must answer within milliseconds. Its format for scalars is small: a
TFRecord frame (length, masked CRC-32C of the length, data, masked CRC-32C of the data; little endian) around
each ``tensorflow.Event`` protocol buffer. Of that message this module writes five fields::

    Event    1 wall_time double    2 step int64    3 file_version string    5 summary Summary
    Summary  1 value repeated Value
    Value    1 tag string    2 simple_value float

A restarted member repeats some steps. When a step comes again, readers drop a tag's earlier values from that step on.
The fast reader always does so; the reader in Python only if the file says version 1 and the last event has a later
step. So the file says version 1, and before repeated steps an empty event is written whose step is one above all
earlier ones.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from rlmesh.observe.files.append_file import AppendFile

__all__ = ["EventFile"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CASTAGNOLI = 0x82F63B78
_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,12})\.")


class EventFile:
    """One event file in ``directory``, created at the first scalar; nothing is buffered."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: AppendFile | None = None

    def add_scalars(self, scalars: Mapping[str, float], *, step: int, at: float) -> None:
        """Append ``scalars`` (tag → value) of one step; ``at`` in seconds since the epoch.

        Raises:
            OSError: the file cannot be created or written.
        """
        if not scalars:
            return
        if self._file is None:
            self._file = self._open(at)
        values = b"".join(_field(1, _BYTES, _scalar(tag, value)) for tag, value in scalars.items())
        self._file.append(_frame(_event(at, _field(2, _VARINT, _varint(step)) + _field(5, _BYTES, values))))

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def expect_replay(self, highest: int, *, at: float) -> None:
        """Let scalars of steps up to ``highest`` that come from now on replace earlier ones.

        Raises:
            OSError: the file cannot be created or written.
        """
        if self._file is None:
            self._file = self._open(at)
        self._file.append(_frame(_event(at, _field(2, _VARINT, _varint(highest + 1)))))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self, at: float) -> AppendFile:
        # The viewer reads the files of a directory in the order of their names, and drops values of later steps that it
        # has read when earlier ones come. So a clock that was set back must not put this file before older ones.
        found = [_NAME.match(path.name) for path in self._directory.glob("events.out.tfevents.*")]
        at_s = max([int(time.time()), *(int(one[1]) + 1 for one in found if one)])
        name = f"events.out.tfevents.{at_s:010d}.{socket.gethostname()}.{os.getpid()}.rlmesh"
        file = AppendFile(self._directory / name, lines=False)
        try:
            file.append(_frame(_event(at, _field(3, _BYTES, b"brain.Event:1"))))
        except OSError:
            file.close()
            raise
        return file


def _event(at: float, rest: bytes) -> bytes:
    return _field(1, _FIXED64, struct.pack("<d", at)) + rest


def _scalar(tag: str, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # finite, but not as a 32-bit float
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _field(1, _BYTES, tag.encode("utf-8", "backslashreplace")) + _field(2, _FIXED32, packed)


def _field(number: int, wire_type: int, payload: bytes) -> bytes:
    head = bytes([number << 3 | wire_type])
    return head + _varint(len(payload)) + payload if wire_type == _BYTES else head + payload


def _varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF  # negative int64 values are written as their two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFF_FFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def _crc_table() -> tuple[int, ...]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CASTAGNOLI if entry & 1 else 0)
        table.append(entry)
    return tuple(table)


_TABLE = _crc_table()
