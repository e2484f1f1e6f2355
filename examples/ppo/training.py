"""One model in training, sharded over the ranks of its role: what the actor and the critic have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlmesh.rl.losses import valid_count

from .common import Experience, write_atomically
from .config import PPOConfig

LossFunction = Callable[[Experience, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""(rows, valid tokens of the whole minibatch) → (this part's share of the loss, shares of statistics)."""


class ShardedModel:
    """A model under FSDP2, its AdamW, and the loop over minibatches and micro-batches.

    All methods are collective: every rank of the role calls them, in the same order.
    """

    def __init__(self, model: nn.Module, config: PPOConfig, *, lr: float) -> None:
        self.config = config
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # Sharded as a whole: a tiny model does not need its layers gathered one by one.
        fully_shard(model, mesh=init_device_mesh("cpu", (self.ranks,)), reshard_after_forward=False)
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, config.lr_share)
        self.generator = torch.Generator()

    def update(self, experience: Experience, loss_function: LossFunction) -> dict[str, float]:
        """Train on this rank's share of a batch.

        Returns:
            means over the whole batch and all passes over it, the same on every rank, and ``grad_norm``.
        """
        # Of the step, not of the process: who goes back to a checkpoint draws what was drawn before.
        self.generator.manual_seed(self.config.seed + 7919 * self.rank + 104_729 * self.schedule.last_epoch)
        sums: dict[str, Tensor] = {}
        updates = 0
        for minibatch in self._minibatches(experience):
            count = valid_count(minibatch.action_mask, "token-mean")
            dist.all_reduce(count)
            self.optimizer.zero_grad()
            for part in minibatch.split(self._parts(len(minibatch))):
                loss, statistics = loss_function(part, count)
                # FSDP averages gradients over the ranks; the shares of the loss add up.
                (loss * self.ranks).backward()
                for name, value in statistics.items():
                    sums[name] = sums.get(name, torch.zeros(())) + value.detach()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
            sums["grad_norm"] = sums.get("grad_norm", torch.zeros(())) + _whole(norm) / self.ranks
            self.optimizer.step()
            updates += 1
        self.schedule.step()
        totals = torch.stack(list(sums.values())) / updates
        dist.all_reduce(totals)
        return dict(zip(sums, totals.tolist(), strict=True))

    def _minibatches(self, experience: Experience) -> Iterator[Experience]:
        for _ in range(self.config.ppo_epochs):
            if self.config.minibatches == 1:
                yield experience
            else:
                yield from experience.rows(torch.randperm(len(experience), generator=self.generator)).split(
                    self.config.minibatches
                )

    def _parts(self, rows: int) -> int:
        """Number of micro-batches: that of the fullest rank, since each one is a collective step of FSDP."""
        parts = torch.tensor(-(-rows // self.config.micro_batch_size))
        dist.all_reduce(parts, dist.ReduceOp.MAX)
        return int(parts)

    def save(self, path: Path, step: int) -> None:
        """Write weights, optimizer and schedule, unsharded, as one file; rank 0 does, all ranks wait for it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if self.rank == 0:
            state: dict[str, Any] = {
                "step": step,
                "model": weights,
                "optimizer": optimizer,
                "schedule": self.schedule.state_dict(),
            }
            write_atomically(path, lambda file: torch.save(state, file))
        dist.barrier()

    def load(self, path: Path) -> None:
        """Take back what :meth:`save` wrote, each rank its shard."""
        state = torch.load(path, weights_only=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True, cpu_offload=True),
        )
        self.schedule.load_state_dict(state["schedule"])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
