"""`DDPEngine`: every rank has the whole model, and gradients are summed over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.activation_checkpointing import checkpoint_activations
from rlmesh.rl.engines.training.torch_engine import TorchEngine


class DDPEngine(TorchEngine):
    """torch's DistributedDataParallel; the module alone if there is one rank.

    With precision "bfloat16" the weights stay float32 and forward passes run under autocast.
    """

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.options.activation_checkpointing:
            checkpoint_activations(model)
        return self._distributed(model)

    def _distributed(self, model: nn.Module) -> nn.Module:
        if not ranks.several():
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16")

    def _one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        no_sync: AbstractContextManager[object] = self.model.no_sync()
        return no_sync

    # The wrapper holds buckets as large as all gradients, which are freed only with the wrapper. NCCL keeps the buckets
    # of the last reduction until a later collective, so their memory is freed here.

    def offload(self, folder: Path | None = None) -> None:
        wrapped, self.model = self.model is not self.plain, self.plain
        if wrapped and self._offloaded is None:
            buckets = [p.grad.untyped_storage() for p in self.plain.parameters() if p.grad is not None]
            self._forget_gradients()
            for bucket in buckets:
                bucket.resize_(0)
        super().offload(folder)

    def reload(self) -> None:
        super().reload()
        if self.model is self.plain:
            self.model = self._distributed(self.plain)
