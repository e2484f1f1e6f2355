"""The processes that vLLM starts below this one: its engine's and its workers'."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

__all__ = ["children", "forget"]

NAMES = ("EngineCore", "VllmWorker")


def children() -> Sequence[BaseProcess]:
    """The live child processes of all engines of this process."""
    return [child for child in multiprocessing.active_children() if child.name.startswith(NAMES)]


def forget(ended: Sequence[BaseProcess]) -> None:
    """Reap ended processes, and close the pipes to them, which a watching thread of vLLM or reference cycles would hold
    longer."""
    gc.collect()
    for child in ended:
        if child.exitcode is not None:
            child.close()
