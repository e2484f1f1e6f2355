"""`FrozenModel`: a model that is not trained, and that can be moved off its device for a time."""

from __future__ import annotations

from torch import nn

from rlmesh.rl.engines.host_memory import KeptRooms
from rlmesh.rl.engines.training.offload import Offloaded, own_memory

__all__ = ["FrozenModel"]


class FrozenModel:
    """A model in eval mode, on its device."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        own_memory([*model.parameters(), *model.buffers()])
        self.device = next(model.parameters()).device
        self._offloaded: Offloaded | None = None
        self._rooms = KeptRooms()

    def sleep(self) -> None:
        """Move the weights to host memory."""
        if self._offloaded is None:
            self._offloaded = Offloaded([*self.model.parameters(), *self.model.buffers()], None, self._rooms)

    def wake(self) -> None:
        """Move the weights back."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
