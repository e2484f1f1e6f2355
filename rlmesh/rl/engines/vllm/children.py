"""The processes that vLLM starts below this one: its engine's and its workers'."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

__all__ = ["children", "forget"]

NAMES = ("EngineCore", "VllmWorker")


def children() -> Sequence[BaseProcess]:
    """Those that live now, of all engines of this process."""
    return [child for child in multiprocessing.active_children() if child.name.startswith(NAMES)]


def forget(ended: Sequence[BaseProcess]) -> None:
    """Take the exit status of those that have ended, and close the pipes to them: a thread of vLLM's that watched them
    holds these for a while longer, and so do cycles."""
    gc.collect()
    for child in ended:
        if child.exitcode is not None:
            child.close()
