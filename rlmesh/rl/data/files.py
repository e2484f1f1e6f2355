"""Rows of parquet, JSON-lines (also compressed by gzip) and JSON files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlmesh.drafts import Draft
from rlmesh.errors import UsageError
from rlmesh.rl.faults import similar_path

__all__ = ["Row", "expand", "is_data", "read_rows", "write_parquet"]

Row = dict[str, Any]

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json")


def expand(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Expand folders to their data files, in the order of their names; files stay as they are.

    Raises:
        UsageError: a file does not exist, a folder has no data file, or a suffix is unknown.
    """
    found: list[Path] = []
    for given in [files] if isinstance(files, (str, Path)) else files:
        path = Path(given).expanduser()
        if path.is_dir():
            inside = sorted(child for child in path.iterdir() if is_data(child))
            if not inside:
                raise UsageError(f"the folder {path} has no {', '.join(SUFFIXES)} file")
            found += inside
        elif not path.exists():
            raise UsageError(f"there is no data file {path}{similar_path(path)}")
        elif not is_data(path):
            raise UsageError(f"{path} cannot be read: the suffix must be one of {', '.join(SUFFIXES)}")
        else:
            found.append(path)
    if not found:
        raise UsageError("no data file given")
    return found


def is_data(path: Path) -> bool:
    """True if the name of a file is that of a data file."""
    return path.name.endswith(SUFFIXES)


def read_rows(files: str | Path | Sequence[str | Path]) -> list[Row]:
    """All rows of all files.

    Raises:
        UsageError: a file cannot be read; the message names the file, and the line where there is one.
    """
    rows: list[Row] = []
    for path in expand(files):
        rows += next(read for suffix, read in _READERS.items() if path.name.endswith(suffix))(path)
    return rows


def write_parquet(rows: Iterable[Row], path: Path) -> int:
    """Write rows to a parquet file, atomically; returns their number.

    Raises:
        UsageError: there is no row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    listed = list(rows)
    if not listed:
        raise UsageError(f"nothing to write to {path}: no row is left")
    path.parent.mkdir(parents=True, exist_ok=True)
    with Draft(path) as file:
        pq.write_table(pa.Table.from_pylist(listed), file)
    return len(listed)


def _parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[Row] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path} is no parquet file that can be read: {error}") from error
    return rows


def _json_lines(path: Path) -> list[Row]:
    rows = []
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_mapping(_parsed(line, f"{path}:{number}"), f"{path}:{number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return rows


def _json(path: Path) -> list[Row]:
    try:
        whole = _parsed(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(whole, list):
        raise UsageError(f"{path} must hold a list of rows, it holds {type(whole).__name__}")
    return [_mapping(row, f"{path}, row {number}") for number, row in enumerate(whole)]


_READERS = {".parquet": _parquet, ".jsonl": _json_lines, ".jsonl.gz": _json_lines, ".json": _json}


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is no JSON: {error}") from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UsageError(f"{where} must be a row with names, it is {type(row).__name__}")
    return row
