"""The processes that vLLM starts below this one: its engine's and its workers'."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

__all__ = ["children", "forget"]

NAMES = ("EngineCore", "VllmWorker")
KILLED_S = 10.0
"""Seconds in which a killed process ends. vLLM kills a child that does not end by itself, and does not wait for it."""


def children(besides: Sequence[BaseProcess] = ()) -> list[BaseProcess]:
    """The live child processes of this process's engines, without those of ``besides``."""
    return [
        child for child in multiprocessing.active_children() if child.name.startswith(NAMES) and child not in besides
    ]


def forget(ended: Sequence[BaseProcess]) -> None:
    """Reap processes that end, and close the pipes to them, which a watching thread of vLLM or reference cycles would
    hold longer."""
    gc.collect()
    for child in ended:
        child.join(KILLED_S)
        if child.exitcode is not None:
            child.close()
