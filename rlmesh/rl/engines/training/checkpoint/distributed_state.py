"""Torch's distributed checkpoints (DCP) in a `CheckpointFolder`, written in the background."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.checkpoint.checked_reading import CheckedReader, TensorsOnly
from rlmesh.rl.engines.training.checkpoint.checksums import sums_of
from rlmesh.rl.engines.training.checkpoint.folders import CheckpointFolder, Saved

KIND = "torch"


def write_state(
    folder: Path, state: dict[str, Any], steps: int, side: dist.ProcessGroup | None, stage: AsyncStager
) -> Callable[[], Path]:
    """Copy a state, and begin to write it. Collective: all ranks call it.

    Args:
        state: nested mappings of tensors and DTensors; they may differ between ranks.
        side: a process group for checkpoints only.
        stage: copies the state.

    Returns:
        a function that waits for the files, makes the checkpoint the current one, and returns its folder. It is
        collective too, and blocks: call it on its own thread.
    """
    rank, count = ranks.here()
    place = CheckpointFolder(folder)
    name = _on_first(rank, side, lambda: place.begin(steps), f"{folder}: no checkpoint could be begun")
    data: Path = folder / name
    writer = FileSystemWriter(data, single_file_per_rank=True, sync_files=True)
    writing: Any = async_save(
        state, storage_writer=writer, process_group=side, no_dist=side is None, async_stager=stage
    )
    failed = f"{folder}: the checkpoint of step {steps} is not complete"

    def finish() -> Path:
        try:
            writing.result()
            # Each rank reads its own files, since only its node may have them in the page cache.
            mine = [path.name for path in data.iterdir() if path.name.startswith(f"__{rank}_") or _is_index(path, rank)]
            parts = ranks.gathered(_attempt(lambda: sums_of(data, mine)), side)
            if faults := [str(part) for part in parts if isinstance(part, OSError)]:
                raise OSError(f"{failed}: {faults[0]}")
            saved = Saved(name, steps, KIND, count, {name: one for part in parts for name, one in part.items()})
            _on_first(rank, side, lambda: place.commit(saved), failed)
        except BaseException as error:
            if rank == 0:  # makes room for the next checkpoint
                shutil.rmtree(data, ignore_errors=True)
            if isinstance(error, CheckpointException):  # the text of this error is the tracebacks of all ranks
                first = next(iter(error.failures.values()))[0]
                raise OSError(f"{failed}: {first}") from error
            raise
        return data

    return finish


def _is_index(path: Path, rank: int) -> bool:
    return rank == 0 and path.name == ".metadata"


def _attempt(work: Callable[[], Any]) -> Any:
    """The result or the error of ``work``, which the rank then sends to the others."""
    try:
        return work()
    except OSError as error:
        return error


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
    """Fill the tensors of ``state``, in place, from a checkpoint. Collective; other tensors are not read.

    Raises:
        UsageError: see `require_whole`; or the checkpoint lacks a tensor of the state, or has it in another shape.
    """
    reader = CheckedReader(place.data_of(saved))
    # Checked on every rank before the collective step, which would wrap an error.
    _require_fit(place.folder, reader.read_metadata(), state)
    load(state, storage_reader=reader, planner=TensorsOnly(), process_group=side, no_dist=side is None)


def require_whole(place: CheckpointFolder, saved: Saved, side: dist.ProcessGroup | None) -> None:
    """Check that a checkpoint is complete and unaltered. Collective: each rank checks a share of the files.

    Raises:
        UsageError: the checkpoint is of another kind, another user can have written it, or a file of it is missing,
            incomplete or altered.
    """
    if saved.kind != KIND:
        raise UsageError(f"{place.folder} holds a checkpoint of kind {saved.kind!r}; this engine reads {KIND!r}")
    rank, count = ranks.here()
    if fault := ranks.from_first(place.fault_in(saved) if rank == 0 else "", side):
        raise UsageError(fault)
    if faults := [each for each in ranks.gathered(place.damage_in(saved, rank, count), side) if each]:
        raise UsageError(faults[0])


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
