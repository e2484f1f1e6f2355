"""Sizes and checksums of a checkpoint's files, which reveal incomplete or altered files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FileSum", "damage_of", "sums_from", "sums_of"]


@dataclass(frozen=True, slots=True)
class FileSum:
    """The expected size and checksum of a file.

    Attributes:
        size_bytes: length of the file.
        sha256: checksum of the file, in hexadecimal digits.
    """

    size_bytes: int
    sha256: str


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """The size and the checksum of each file of a folder.

    Raises:
        OSError: a file cannot be read.
    """
    found = {}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = FileSum(os.fstat(file.fileno()).st_size, digest)
    return found


def damage_of(folder: Path, sums: Mapping[str, FileSum], names: Iterable[str] | None = None) -> str:
    """A text about the first file that differs from what was written; empty if there is none.

    Args:
        folder: folder of the files.
        sums: expected sizes and checksums, by file name.
        names: the files to check; None: all of ``sums``.
    """
    for name in sorted(sums if names is None else names):
        path, wanted = folder / name, sums[name]
        try:
            size = path.stat().st_size
            if size != wanted.size_bytes:
                return f"{path} has {size} bytes, and had {wanted.size_bytes} when it was written: it is torn"
            if sums_of(folder, [name])[name] != wanted:
                return f"{path} was altered: its checksum differs from that of what was written"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
    return ""


def sums_from(fields: Any) -> dict[str, FileSum]:
    """Read sizes and checksums from JSON values.

    Raises:
        TypeError: the values have another form.
        ValueError: a name leads out of the folder.
    """
    if not isinstance(fields, dict):
        raise TypeError(f"expected the sums of files, not {fields!r:.80}")
    if outside := [name for name in fields if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise ValueError(f"{outside[0]!r:.80} names a file outside of its folder")
    return {name: FileSum(**each) for name, each in fields.items()}
