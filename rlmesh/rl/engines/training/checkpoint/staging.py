"""`HostStage`: copies a state to host memory, from where a checkpoint is written while training continues."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from rlmesh.rl.engines.host_memory import empty_on_host

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
            self._buffers = _empty_state(state_dict)
        copied: dict[str, Any] = _copy_state_dict(state_dict, self._buffers)
        return copied

    def synchronize_staging(self) -> None:
        """Return at once: `stage` returns when the copy is complete."""

    def close(self) -> None:
        self._buffers = None


def _empty_state(state: dict[str, Any]) -> dict[str, Any]:
    """A state of the same structure, whose tensors are new ones in host memory."""
    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                collect(each)
        elif isinstance(value, Tensor):
            found.append(value._local_tensor if isinstance(value, DTensor) else value)

    collect(state)
    made = iter(empty_on_host(found))

    def rebuild(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rebuild(each) for key, each in value.items()}
        if isinstance(value, DTensor):
            return DTensor(next(made), value._spec, requires_grad=False)
        return next(made) if isinstance(value, Tensor) else value

    rebuilt: dict[str, Any] = rebuild(state)
    return rebuilt


class Copied(AsyncStager):
    """Stands for a stage where the state is a copy already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Frees nothing: this copy lives as long as its state dict."""
