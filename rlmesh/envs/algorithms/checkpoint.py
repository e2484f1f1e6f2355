"""Checkpoints of algorithms: a folder that is there as a whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh.drafts import draft_beside, remove_drafts
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.batches.tensors import arrays_of_tree, tensors_of_tree
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.algorithms.algorithm import Algorithm

__all__ = ["COUNTERS", "config_of", "restore", "save"]

logger = logging.getLogger(__name__)

COUNTERS = ("iteration", "env_steps_trained", "agent_steps_trained", "time_total_s")
FORMAT = 1
STATE, CONFIG, RUNNERS = "state.pt", "config.pkl", "runners.pkl"


def save(algorithm: Algorithm, folder: Path) -> str:
    """Write the checkpoint under a temporary name, then rename it; an older checkpoint of its name is replaced."""
    import cloudpickle
    import torch

    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = _draft_folder(folder)
    try:
        state = {"format": FORMAT, "algorithm": type(algorithm).__name__, **algorithm.get_state()}
        torch.save(tensors_of_tree(state), aside / STATE)
        (aside / CONFIG).write_bytes(cloudpickle.dumps(algorithm.config))
        (aside / RUNNERS).write_bytes(cloudpickle.dumps(algorithm.env_runner_group.runner_states()))
        for name in (STATE, CONFIG, RUNNERS):
            with (aside / name).open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists() and not (folder / STATE).exists() and any(folder.iterdir()):
            raise UsageError(f"save: {folder} is not empty and no checkpoint; name another folder")
        put_in_place(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    remove_drafts(folder)
    return str(folder)


def _draft_folder(folder: Path) -> Path:
    draft = Path(draft_beside(folder))
    draft.mkdir(mode=0o700)
    return draft


def put_in_place(aside: Path, folder: Path) -> None:
    """Give a folder the name of another one, if there is one, and remove that.

    The two change their names in one step, so that a process that is killed leaves the old or the new folder. Only
    where the file system cannot do so, as NFS, there is a moment without either.
    """
    if not folder.exists():
        aside.rename(folder)
    elif _exchange(aside, folder):
        shutil.rmtree(aside)
    else:
        old = _draft_folder(folder)
        try:
            folder.rename(old / "old")
            aside.rename(folder)
        except BaseException:  # also Ctrl-C
            if not folder.exists():
                (old / "old").rename(folder)
            raise
        finally:
            if folder.exists():  # otherwise the old one is still in there
                shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders by ``renameat2(2)``; False if the system or the file system cannot do so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def restore(algorithm: Algorithm, folder: Path) -> None:
    """Read a checkpoint into an algorithm of the same kind."""
    import torch

    if not (folder / STATE).is_file():
        raise UsageError(f"restore: {folder} has no checkpoint (no {STATE})")
    state = arrays_of_tree(torch.load(folder / STATE, weights_only=True))
    if state.pop("format") != FORMAT:
        raise UsageError(f"restore: {folder} was written by another version of rlmesh")
    name = state.pop("algorithm")
    if name != type(algorithm).__name__:
        raise UsageError(f"restore: {folder} is a checkpoint of {name}, not of {type(algorithm).__name__}")
    try:
        algorithm.set_state(state)
    except RuntimeError as error:
        raise UsageError(
            f"restore: the networks of {folder} are others than those of this algorithm: {error}"
        ) from None
    algorithm.env_runner_group.set_runner_states((folder / RUNNERS).read_bytes())


def config_of(folder: Path) -> AlgorithmConfig:
    """The settings of a checkpoint."""
    import cloudpickle

    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} has no checkpoint (no {CONFIG})")
    config = cloudpickle.loads((folder / CONFIG).read_bytes())
    assert isinstance(config, AlgorithmConfig)
    return config.copy()
