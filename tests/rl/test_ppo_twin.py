"""PPO gives the losses and weights of its NumPy twin over 20 optimizer steps, in float32.

The twin has no packs, no engines and no loss of torch: advantages, losses, their gradients by hand, clipping and AdamW
are NumPy in float64. torch only computes the log-probabilities and values of single rows, and carries the twin's
gradients back to the weights.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.rl import reference
from rlmesh.rl.algorithms import PPO
from rlmesh.rl.roles.value_head import ValueModel

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import trl_equality as equality
from post_training_rlmesh import LocalRun
from post_training_samples import RecordedBatch, record
from post_training_trl import Settings

SETTINGS = Settings(lr=1e-3, eps=1e-6, epochs=2, weight_decay=0.1)
PPO_SETTINGS = PPO(gamma=0.97, lam=0.9, value_clip=0.05)
STEPS = 20
Rows = list[torch.Tensor]


class NumPyAdamW:
    """Clipping by norm and AdamW (Loshchilov and Hutter 2019), in float64, on a module's weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.steps = module, 0
        self.moments = {name: (0.0, 0.0) for name, _ in module.named_parameters()}

    def step(self) -> None:
        self.steps += 1
        grads = {name: p.grad.numpy() for name, p in self.module.named_parameters() if p.grad is not None}
        assert {*grads} == {*self.moments}
        norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
        scale = min(1.0, SETTINGS.max_grad_norm / (norm + 1e-6))
        for name, weight in self.module.named_parameters():
            grad, (first, second) = grads[name] * scale, self.moments[name]
            first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
            self.moments[name] = first, second
            mean, square = first / (1 - 0.9**self.steps), second / (1 - 0.999**self.steps)
            values = weight.detach().numpy()
            if values.ndim > 1:
                values *= 1 - SETTINGS.lr * SETTINGS.weight_decay
            values -= SETTINGS.lr * mean / (np.sqrt(square) + SETTINGS.eps)
        self.module.zero_grad()


class Twin:
    """Two models in float64 and their optimizers."""

    def __init__(self, policy: Any, critic: ValueModel) -> None:
        self.policy, self.critic = deepcopy(policy).double(), deepcopy(critic).double()
        self.optimizers = NumPyAdamW(self.policy), NumPyAdamW(self.critic)

    def rows(self, batch: RecordedBatch) -> tuple[Rows, Rows]:
        """Log-probabilities and values of each response's tokens, row by row, with gradient."""
        log_probs, values = [], []
        for prompt, group in zip(batch.prompts, batch.responses, strict=True):
            for response in group:
                ids = torch.tensor([[*prompt, *response]])
                before = slice(len(prompt) - 1, -1)
                logits = self.policy(input_ids=ids).logits[0, before].log_softmax(-1)
                log_probs.append(logits.gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1))
                attend = torch.ones_like(ids)
                values.append(self.critic(ids, attend, torch.arange(ids.shape[1]).unsqueeze(0))[0, before, 0])
        return log_probs, values

    def step(self, batch: RecordedBatch) -> list[tuple[float, float]]:
        """Two epochs; the losses of policy and critic in each."""
        rewards = [reward for group in batch.rewards for reward in group]
        lengths = [len(response) for group in batch.responses for response in group]
        mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
        scores = np.zeros(mask.shape)
        scores[np.arange(len(lengths)), np.array(lengths) - 1] = rewards
        old = tuple(map(matrix, self.rows(batch)))
        advantages, returns = reference.gae(scores, old[1], mask, gamma=PPO_SETTINGS.gamma, lam=PPO_SETTINGS.lam)
        advantages = reference.masked_whiten(advantages, mask)
        found = []
        for _ in range(SETTINGS.epochs):
            log_probs, values = self.rows(batch)
            now, value = matrix(log_probs), matrix(values)
            loss, ratio, clipped = reference.ppo_clip_loss(now, old[0], advantages, mask)
            value_loss, _ = reference.value_clip_loss(value, old[1], returns, mask, clip=PPO_SETTINGS.value_clip)
            tokens = mask.sum()
            found.append((loss[mask].sum() / tokens, value_loss[mask].sum() / tokens))
            slope = np.where(clipped, 0.0, -advantages * ratio) / tokens
            # Where the value moved further than the clip and the bounded error is the larger one, it is constant.
            _, constant = reference.value_clip_loss(value, old[1], returns, mask, clip=PPO_SETTINGS.value_clip)
            value_slope = np.where(constant, 0.0, value - returns) / tokens
            for rows, slopes, optimizer in ((log_probs, slope, 0), (values, value_slope, 1)):
                given = [torch.from_numpy(slopes[row, : len(x)].copy()) for row, x in enumerate(rows)]
                torch.autograd.backward(rows, given)
                self.optimizers[optimizer].step()
        return found


def matrix(rows: Rows) -> np.ndarray:
    found = np.zeros((len(rows), max(map(len, rows))))
    for row, values in enumerate(rows):
        found[row, : len(values)] = values.detach().numpy()
    return found


def test_losses_and_weights_are_those_of_the_numpy_twin() -> None:
    torch.set_num_threads(1)
    policy, shape = equality.initial_model(), equality.SHAPE
    critic = ValueModel(deepcopy(policy).model)
    with torch.no_grad():
        critic.head.get_parameter("weight").copy_(torch.linspace(-0.1, 0.1, shape.width).unsqueeze(0))
    first = {name: value.detach().clone() for name, value in critic.named_parameters()}
    twin = Twin(policy, critic)
    run = LocalRun(
        policy, shape.samples, shape.response_tokens, SETTINGS, critic=critic, algorithm=PPO_SETTINGS, token_budget=120
    )
    clipped = 0.0
    for batch in record(shape, STEPS // SETTINGS.epochs):
        theirs = twin.step(batch)
        run.critic.reports.clear()
        ours = run.step(batch)
        clipped += sum(report.statistics["clipped"] for report in (*run.actor.reports, *run.critic.reports))
        assert [seen.loss for seen in ours] == pytest.approx([loss for loss, _ in theirs], abs=1e-5, rel=0)
        losses = [report.loss for report in run.critic.reports]
        assert losses == pytest.approx([loss for _, loss in theirs], abs=1e-5, rel=0)
    for model, other in ((policy, twin.policy), (critic, twin.critic)):
        wanted = dict(other.named_parameters())
        for name, value in model.named_parameters():
            assert (value.detach().double() - wanted[name].detach()).abs().max() < 1e-5, name
    assert clipped > 0
    moved = [(value.detach() - first[name]).abs().max() for name, value in critic.named_parameters()]
    assert max(map(float, moved)) > 1e-3
