"""The files of samples in a run directory, and their rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh import private_files
from rlmesh.errors import UsageError
from rlmesh.rl.samples.columns import TOKENS

__all__ = [
    "FOLDER", "SampleFile", "Sampled", "columns_in", "file_name", "read_file", "read_rows_with_tokens",
    "sample_files",
]  # fmt: skip

FOLDER = "samples"
SPLITS = ("train", "validation")
_NAME = re.compile(rf"({'|'.join(SPLITS)})-(\d+)\.parquet")

Sampled = dict[str, Any]
"""One sample: its columns by name (:func:`rlmesh.rl.samples.columns.columns_of`), without the columns of tokens."""


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The samples of one step."""

    split: str
    step: int
    path: Path


def file_name(split: str, step: int) -> str:
    """The name of the file of a step."""
    return f"{split}-{step:08d}.parquet"


def sample_files(run_dir: Path) -> list[SampleFile]:
    """The files of samples in a run directory that belong to this user, by split and step."""
    names = ((path, _NAME.fullmatch(path.name)) for path in private_files.files_in(run_dir / FOLDER, "*.parquet"))
    found = [SampleFile(name[1], int(name[2]), path) for path, name in names if name]
    return sorted(found, key=lambda one: (one.split, one.step))


def columns_in(file: SampleFile) -> list[str]:
    """The names of a file's columns, without the columns of tokens.

    Raises:
        UsageError: see `read_file`.
    """
    with _opened(file) as content:
        return _named(content)


def read_file(file: SampleFile) -> list[Sampled]:
    """The samples of a step.

    Raises:
        UsageError: the file cannot be read, or another user may have made it.
    """
    with _opened(file) as content:
        rows: list[Sampled] = content.read(columns=_named(content)).to_pylist()
        return rows


def read_rows_with_tokens(file: SampleFile) -> list[dict[str, Any]]:
    """The samples of a step, including the columns of tokens.

    Raises:
        UsageError: see `read_file`.
    """
    with _opened(file) as content:
        rows: list[dict[str, Any]] = content.read().to_pylist()
        return rows


def _named(content: Any) -> list[str]:
    return [name for name in content.schema_arrow.names if name not in TOKENS]


@contextmanager
def _opened(file: SampleFile) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UsageError(
            f"samples are Parquet files, which need pyarrow ({error}): pip install 'rlmesh[data]'"
        ) from None
    try:
        with os.fdopen(private_files.open_file(file.path, os.O_RDONLY), "rb") as opened:
            yield pq.ParquetFile(opened)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{file.path} cannot be read: {error}") from error
