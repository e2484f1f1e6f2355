"""Torch's distributed checkpoints (DCP) in a `CheckpointFolder`, written in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.checkpoint.checked_reading import CheckedReader, TensorsOnly
from rlmesh.rl.engines.training.checkpoint.folders import CheckpointFolder, Saved

KIND = "torch"


def write_state(folder: Path, state: dict[str, Any], steps: int, side: dist.ProcessGroup | None) -> Callable[[], Path]:
    """Copy a state, and begin to write it. A collective step.

    Args:
        state: nested mappings of tensors and DTensors; they may differ between ranks.
        side: a group for checkpoints alone.

    Returns:
        a function that waits, makes the checkpoint the current one, and returns its folder. It is a collective step
        too, and blocks: call it on a thread of its own.
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
    """Run ``work`` on rank 0; every rank gets its result, or its error."""
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
    """Fill the tensors of ``state``, in place, from a checkpoint. A collective step; other tensors are not read.

    Raises:
        UsageError: the checkpoint is of another kind, another user can have written it, its index is invalid, or it
            lacks a tensor of the state or has it in another shape.
    """
    if saved.kind != KIND:
        raise UsageError(f"{place.folder} holds a checkpoint of kind {saved.kind!r}; this engine reads {KIND!r}")
    rank, _ = ranks.here()
    if fault := ranks.from_first(place.fault_in(saved) if rank == 0 else "", side):
        raise UsageError(fault)
    reader = CheckedReader(place.data_of(saved))
    # On every rank before the collective step, which would wrap an error.
    _require_fit(place.folder, reader.read_metadata(), state)
    load(state, storage_reader=reader, planner=TensorsOnly(), process_group=side, no_dist=side is None)


def _require_fit(folder: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    wanted, _ = flatten_state_dict(state)
    saved = metadata.state_dict_metadata
    missing = sorted(name for name in wanted if name not in saved)
    if missing:
        have, want = (f"{'an adapter' if 'base' in keys else 'all weights'}" for keys in (saved, state))
        kinds = f"it holds {have}, and this engine trains {want}" if have != want else "it is of another model"
        raise UsageError(
            f"the checkpoint in {folder} lacks {len(missing)} tensors, the first of which is {missing[0]}: {kinds}"
        )
    for name, tensor in wanted.items():
        found = getattr(saved[name], "size", None)
        if found is not None and tuple(found) != tuple(tensor.shape):
            mine = tuple(tensor.shape)
            raise UsageError(
                f"the checkpoint in {folder} has {name} of shape {tuple(found)}, and this engine of {mine}: "
                "use the model and the LoRA options of the run that wrote it"
            )
