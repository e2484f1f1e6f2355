"""torch's distributed checkpoints (DCP) in a `CheckpointFolder`: written on the side, read for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.checkpoint.checked_reading import CheckedReader, TensorsOnly
from rlmesh.rl.engines.training.checkpoint.folders import CheckpointFolder, Saved

KIND = "torch"


def write_state(folder: Path, state: dict[str, Any], steps: int, side: dist.ProcessGroup | None) -> Callable[[], Path]:
    """Copy a state, and begin to write it. A collective step, as is what it gives: call that on a thread.

    Args:
        state: nested mappings of tensors and DTensors; ranks may have different ones.
        side: a group for this alone.

    Returns:
        a function that waits, makes the checkpoint the current one, and gives its folder.
    """
    rank, count = ranks.here()
    place = CheckpointFolder(folder)
    name = _on_first(rank, side, lambda: place.begin(steps), f"{folder}: no checkpoint could be begun")
    data: Path = folder / name
    writer = FileSystemWriter(data, single_file_per_rank=True, sync_files=True)
    writing: Any = async_save(state, storage_writer=writer, process_group=side, no_dist=side is None)

    def finish() -> Path:
        writing.result()
        saved = Saved(name, steps, KIND, count)
        _on_first(rank, side, lambda: place.commit(saved), f"{folder}: the checkpoint of step {steps} is not complete")
        return data

    return finish


def _on_first(rank: int, side: dist.ProcessGroup | None, work: Callable[[], Any], failed: str) -> Any:
    """Do it on rank 0; what it gives, on every rank, and its fault too."""
    result: Any = None
    fault = ""
    if rank == 0:
        try:
            result = work()
        except OSError as error:
            fault = str(error)
    result, fault = ranks.from_first((result, fault), side)
    if fault:
        raise OSError(f"{failed}: {fault}")
    return result


def read_state(place: CheckpointFolder, saved: Saved, state: dict[str, Any], side: dist.ProcessGroup | None) -> None:
    """Fill the tensors of ``state``, in place, from a checkpoint. A collective step; only what ``state`` has is read.

    Raises:
        UsageError: it is of another kind, somebody else can have written it, or its index is none.
    """
    if saved.kind != KIND:
        raise UsageError(f"{place.folder} holds a checkpoint of kind {saved.kind!r}; this engine reads {KIND!r}")
    rank, _ = ranks.here()
    if fault := ranks.from_first(place.fault_in(saved) if rank == 0 else "", side):
        raise UsageError(fault)
    reader = CheckedReader(place.data_of(saved))
    reader.read_metadata()  # on every rank before the collective step, which would wrap what is wrong with it
    load(state, storage_reader=reader, planner=TensorsOnly(), process_group=side, no_dist=side is None)
