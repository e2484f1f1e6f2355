"""Sample batches in files: NumPy's compressed archives, without pickle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh.drafts import Draft
from rlmesh.envs.batches.sample_batch import SampleBatch, Tree
from rlmesh.errors import UsageError

__all__ = ["read_batch", "write_batch"]

FORMAT_NAME, FORMAT = "__rlmesh_batch__", 1
SEPARATOR = "/"


def write_batch(path: str | Path, batch: SampleBatch) -> str:
    """Write a batch into a file, which is there as a whole or not at all; returns its path.

    Columns of objects, such as infos, are left out.

    Args:
        path: ends with ``.npz``.
        batch: its columns are arrays, or dicts of arrays.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise UsageError(f"write_batch: a file of a batch ends with .npz, not {path.name!r}")
    arrays = {name: leaf for column in batch for name, leaf in _named(column, batch[column]) if leaf.dtype != object}
    path.parent.mkdir(parents=True, exist_ok=True)
    named: dict[str, Any] = {FORMAT_NAME: np.array(FORMAT), **arrays}
    with Draft(path) as file:
        np.savez_compressed(file, **named)
    return str(path)


def read_batch(path: str | Path) -> SampleBatch:
    """The batch in a file of `write_batch`.

    Raises:
        UsageError: the file is no batch.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path} is no file of a batch ({error}); write_batch writes one") from error
    if FORMAT_NAME not in arrays or int(arrays.pop(FORMAT_NAME)) != FORMAT:
        raise UsageError(f"{path} was not written by write_batch of this version")
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split(SEPARATOR)
        place = columns
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return SampleBatch(columns)


def _named(name: str, tree: Tree) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, np.ndarray):
        yield name, tree
    elif isinstance(tree, dict):
        for key, each in tree.items():
            yield from _named(f"{name}{SEPARATOR}{key}", each)
    else:
        raise UsageError(f"write_batch: the column {name!r} is a tuple; files have arrays and dicts of arrays")
