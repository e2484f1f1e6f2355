"""`FSDP2Engine`: parameters, gradients and optimizer state sharded over the ranks by torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.activation_checkpointing import checkpoint_activations, layers_of
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.rl.engines.training.torch_engine import TorchEngine


class FSDP2Engine(TorchEngine):
    """Parameters are sharded layer by layer, and gathered only while their layer computes.

    With precision "bfloat16" shards are float32, gathered parameters and computations are bfloat16, and gradients are
    summed in float32. A module with an attribute ``full_precision`` that is True computes in float32.

    Args:
        model: a plain model, with its weights.
        options: see `TrainingOptions`.
        layers: modules that are gathered one at a time; None: the model's repeated blocks; empty: the whole model.
    """

    def __init__(
        self, model: nn.Module, options: TrainingOptions, *, layers: Sequence[nn.Module] | None = None
    ) -> None:
        self._layers = layers
        super().__init__(model, options)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if not dist.is_initialized():
            raise UsageError("FSDP2Engine needs a process group: call torch.distributed.init_process_group() first")
        if self.options.activation_checkpointing:
            checkpoint_activations(model)
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        policy = MixedPrecisionPolicy()
        if self.options.precision == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in [one for one in model.modules() if getattr(one, "full_precision", False)]:
            fully_shard(module, mesh=mesh)
        for layer in layers_of(model) if self._layers is None else self._layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # Parameters outside of layers are resharded after each pass too: parameters() are shards between passes.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        return model

    def _one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()
