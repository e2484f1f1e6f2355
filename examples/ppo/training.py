"""Training of a model on the ranks of its role: the common part of actor and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmesh.rl import TrainingEngine, TrainingOptions
from rlmesh.rl.losses import valid_count

from .common import Experience
from .config import PPOConfig

LossFunction = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""(model, rows, count= valid tokens of the whole minibatch) → (this part's share of the loss, shares of statistics)."""


def make_engine(kind: str, model: nn.Module, config: PPOConfig, *, lr: float) -> TrainingEngine:
    """The engine ``fsdp2``, ``ddp``, ``zero1``, ``zero2`` or ``zero3`` for a model; all train in the same way."""
    per_update = config.ppo_epochs * config.minibatches
    options = TrainingOptions(
        lr=lr,
        schedule=lambda steps: config.lr_share(steps // per_update),
        weight_decay=0.01,
        max_grad_norm=config.max_grad_norm,
        micro_batch_size=config.micro_batch_size,
        activation_checkpointing=config.activation_checkpointing,
    )
    if kind == "fsdp2":
        from rlmesh.rl import FSDP2Engine

        return FSDP2Engine(model, options, layers=[])  # a tiny model is gathered as a whole
    if kind == "ddp":
        from rlmesh.rl import DDPEngine

        return DDPEngine(model, options)
    if kind in ("zero1", "zero2", "zero3"):
        from rlmesh.rl import DeepSpeedEngine

        return DeepSpeedEngine(model, options, stage=int(kind[-1]))
    raise ValueError(f"engine {kind!r}: it is fsdp2, ddp, zero1, zero2 or zero3")


class Learner:
    """The loop over minibatches. All methods are collective: every rank calls them, in the same order."""

    def __init__(self, engine: TrainingEngine, config: PPOConfig) -> None:
        self.engine, self.config = engine, config
        self.generator = torch.Generator()

    @property
    def updates(self) -> int:
        """The number of PPO steps of these weights, including those before a loaded checkpoint."""
        return self.engine.steps // (self.config.ppo_epochs * self.config.minibatches)

    def update(self, experience: Experience, loss_function: LossFunction) -> dict[str, float]:
        """Train on this rank's share of a batch.

        Returns:
            means over the whole batch and all passes, equal on every rank, and ``grad_norm``.
        """
        # The seed depends on the step: after going back to a checkpoint the same minibatches are drawn.
        self.generator.manual_seed(self.config.seed + 7919 * self.engine.rank + 104_729 * self.updates)
        reports = []
        for minibatch in self._minibatches(experience):
            count = valid_count(minibatch.action_mask, "token-mean")
            dist.all_reduce(count)
            reports.append(self.engine.train_step(minibatch, partial(loss_function, count=count)))
        means = {name: mean(report.statistics[name] for report in reports) for name in reports[0].statistics}
        return {**means, "grad_norm": mean(report.grad_norm for report in reports)}

    def _minibatches(self, experience: Experience) -> Iterator[Experience]:
        for _ in range(self.config.ppo_epochs):
            if self.config.minibatches == 1:
                yield experience
            else:
                yield from experience.rows(torch.randperm(len(experience), generator=self.generator)).split(
                    self.config.minibatches
                )
