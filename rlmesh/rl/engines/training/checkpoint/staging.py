"""`HostStage`: copies a state to host memory, from where a checkpoint is written while training continues."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.staging import AsyncStager

__all__ = ["Copied", "HostStage"]


class HostStage(AsyncStager):
    """Copies states of an engine to memory that is kept for the next checkpoint.

    The first copy allocates the memory, whose pages the operating system makes at their first write: on a CPU, it takes
    about ten times as long as later copies. The memory is as large as the state, and pinned if there is a GPU.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[str, Any] | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._buffers is None:
            self._buffers = _create_cpu_state_dict(state_dict, pin_memory=torch.cuda.is_available())
        copied: dict[str, Any] = _copy_state_dict(state_dict, self._buffers)
        return copied

    def synchronize_staging(self) -> None:
        """Return at once: `stage` returns when the copy is complete."""

    def close(self) -> None:
        self._buffers = None


class Copied(AsyncStager):
    """Stands for a stage where the state is a copy already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Frees nothing: this copy lives as long as its state dict."""
