"""The base of learners that update a module with replayed transitions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rlmesh.envs.batches import columns
from rlmesh.envs.learners.flat_adam import FlatAdam
from rlmesh.envs.learners.learner import Learner, threads
from rlmesh.errors import UsageError

__all__ = ["AnyOptimizer", "OffPolicyLearner", "frozen", "trainable"]

AnyOptimizer = FlatAdam | torch.optim.Optimizer


class OffPolicyLearner(Learner):
    """A subclass defines `step`, which makes one update with one batch of transitions, and names the part of the
    module that has a target.

    Attributes:
        target: a copy of that part, which follows slowly.
        updates: number of updates so far.
        sampled: steps of environments so far, which schedules of ``lr`` count; None: they count rows of updates.
        td_errors: target minus value of each transition of the last update, ``[rows]``.
    """

    wants: ClassVar = (columns.OBS, columns.NEW_OBS, columns.ACTIONS, columns.REWARDS, columns.TERMINATEDS)
    may_have: ClassVar = ("weights", "n_steps")

    def __init__(self, module: Any, config: Mapping[str, Any]) -> None:
        super().__init__(module, config)
        self.updates = 0
        self.sampled: int | None = None
        self.td_errors: np.ndarray = np.zeros(0, np.float32)
        self.target = copy.deepcopy(self.followed()).requires_grad_(False).eval()
        self._online: list[torch.Tensor] = list(self.followed().parameters())
        self._late: list[torch.Tensor] = list(self.target.parameters())

    def followed(self) -> nn.Module:
        """The part of the module that has a target."""
        return self.module

    def adam(self, parameters: Any) -> AnyOptimizer:
        """The optimizer of some parameters."""
        return self.make_optimizer(list(parameters))

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One update; returns statistics, and sets ``td_errors``."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def prepare_exploration(self, sampled: int) -> None:
        """Set how the module explores after so many sampled steps."""

    def update(self, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Update the module once with a batch of transitions.

        Returns:
            Statistics of this update.

        Raises:
            UsageError: the batch lacks a column.
            FloatingPointError: a loss is NaN or infinite; no weight has been changed by it.
        """
        self.require_parameters()
        lacks = [name for name in self.wants if name not in batch]
        if lacks:
            raise UsageError(f"{type(self).__name__} needs the column {lacks[0]!r}; the batch has {', '.join(batch)}")
        tensors = {name: torch.from_numpy(batch[name]) for name in (*self.wants, *self.may_have) if name in batch}
        lr = self.set_lr(self.steps if self.sampled is None else self.sampled)
        with threads(self._threads), self.training():
            stats = self.step(tensors)
        self.updates += 1
        self.steps += int(batch[columns.MASK].sum()) if columns.MASK in batch else len(batch[columns.OBS])
        return {**{name: float(value) for name, value in stats.items()}, "curr_lr": lr}

    def discounts(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """γ^k where the episode goes on after the transition of k steps, 0 where it is terminated, ``[rows]``."""
        gamma = self.config["gamma"]
        steps = batch.get("n_steps")
        discount = gamma if steps is None else gamma ** steps.to(batch[columns.REWARDS].dtype)
        return torch.where(batch[columns.TERMINATEDS], 0.0, discount)

    def descend(self, name: str, loss: torch.Tensor, optimizer: AnyOptimizer, parameters: Any) -> None:
        """One step down the gradient of a loss.

        Raises:
            FloatingPointError: the loss is NaN or infinite.
        """
        if not np.isfinite(loss.item()):
            raise FloatingPointError(
                f"update {self.updates} gave a {name} of {loss.item()}: look at the rewards, and lower lr"
            )
        optimizer.zero_grad()
        loss.backward()
        if (most := self.config["grad_clip"]) is not None:
            if isinstance(optimizer, FlatAdam):
                optimizer.clip(most)
            else:
                nn.utils.clip_grad_norm_(parameters, most)
        optimizer.step()

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Move the target by a share of its distance to the module; 1 copies the module (Polyak averaging)."""
        torch._foreach_lerp_(self._late, self._online, share)
        for late, online in zip(self.target.buffers(), self.followed().buffers(), strict=True):
            late.copy_(online)  # statistics of layers, which are averages already

    def get_state(self) -> dict[str, Any]:
        return {
            **super().get_state(), "updates": self.updates, "target": self.target.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers()],
        }  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.updates = state["updates"]
        self.target.load_state_dict(state["target"])
        for optimizer, each in zip(self.optimizers(), state["optimizers"], strict=True):
            optimizer.load_state_dict(each)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that are not frozen."""
    return [p for p in module.parameters() if p.requires_grad]


@contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let parameters get no gradients of what is computed in the block; those that were frozen before stay so."""
    given = [p for p in parameters if p.requires_grad]
    for p in given:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in given:
            p.requires_grad_(True)
