"""DPO and the ranking loss: the gradient of the loss itself, and the twins in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rlmesh.rl import reference
from rlmesh.rl.algorithms import DPO, Evaluated, RewardModelling
from rlmesh.rl.algorithms.preference import dpo, ranked_returns
from rlmesh.rl.losses import ppo_clip_loss, value_clip_loss


def batch(pairs: int = 3, time: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    log_probs, ref = (-torch.rand(2, 2 * pairs, time, generator=generator, dtype=torch.float64) * 3).unbind()
    mask = torch.rand(2 * pairs, time, generator=generator) < 0.7
    mask[:, 0] = True
    log_probs[~mask] = float("nan")
    return log_probs, ref, mask


def evaluated(mask: torch.Tensor, **columns: torch.Tensor | None) -> Evaluated:
    rows = len(mask)
    usual: dict[str, torch.Tensor | None] = {
        "groups": torch.arange(rows) // 2, "rewards": torch.zeros(rows), "valid": torch.zeros(rows, dtype=torch.bool),
        "log_probs": None, "sampled_log_probs": torch.zeros(mask.shape),
    }  # fmt: skip
    return Evaluated(mask=mask, **(usual | columns))  # type: ignore[arg-type]


def test_the_step_of_dpo_has_the_gradient_of_its_loss() -> None:
    log_probs, ref, mask = batch()
    own = log_probs.clone().requires_grad_()
    sums = torch.where(mask, own - ref, 0.0).sum(1)
    margins = 0.3 * (sums[0::2] - sums[1::2])
    loss = -logsigmoid(margins).mean()
    (wanted,) = torch.autograd.grad(loss, own)

    weights = DPO(beta=0.3).weigh(evaluated(mask, log_probs=log_probs, ref_log_probs=ref))
    own = torch.where(mask, log_probs, 0.0).requires_grad_()
    term = ppo_clip_loss(own, own.detach(), weights.advantages, mask).loss
    (found,) = torch.autograd.grad((weights.policy * term).sum() / weights.normalisers.policy, own)
    torch.testing.assert_close(found, torch.where(mask, wanted, 0.0))
    assert weights.metrics["dpo/loss"] == pytest.approx(loss.item())
    assert weights.metrics["dpo/accuracy"] == pytest.approx((margins > 0).double().mean().item())


def test_the_step_of_a_reward_model_has_the_gradient_of_its_loss() -> None:
    values, _, mask = batch()
    mask = torch.zeros_like(mask)
    mask[:, 2] = True
    values = torch.where(mask, torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)).double(), values)
    own = values[:, 2].clone().requires_grad_()
    loss = -logsigmoid(own[0::2] - own[1::2]).mean()
    (wanted,) = torch.autograd.grad(loss, own)

    weights = RewardModelling().weigh(evaluated(mask, values=values))
    assert weights.returns is not None
    new = values.clone().requires_grad_()
    error = value_clip_loss(new, values, weights.returns, mask, clip=None).loss.sum() / (weights.policy > 0).sum()
    (found,) = torch.autograd.grad(error, new)
    torch.testing.assert_close(found[:, 2], wanted)
    assert weights.metrics["loss"] == pytest.approx(loss.item())


def test_both_equal_their_twins() -> None:
    log_probs, ref, mask = batch()
    found = dpo(log_probs, ref, mask, beta=0.2)
    tokens, margins = reference.dpo(log_probs.numpy(), ref.numpy(), mask.numpy(), beta=0.2)
    np.testing.assert_allclose(found.tokens, tokens, rtol=1e-12)
    np.testing.assert_allclose(found.margins, margins, rtol=1e-12)
    one = torch.zeros_like(mask)
    one[torch.arange(len(mask)), torch.arange(len(mask)) % 5] = True
    ranked = ranked_returns(ref, one)
    tokens, margins = reference.ranked_returns(ref.numpy(), one.numpy())
    np.testing.assert_allclose(ranked.tokens, tokens, rtol=1e-12)
    np.testing.assert_allclose(ranked.margins, margins, rtol=1e-12)


def test_what_are_no_pairs_is_refused() -> None:
    log_probs, ref, mask = batch()
    with pytest.raises(ValueError, match="5 responses are no pairs"):
        dpo(log_probs[:5], ref[:5], mask[:5], beta=0.1)
    with pytest.raises(ValueError, match="beta must be > 0"):
        dpo(log_probs, ref, mask, beta=0.0)
    with pytest.raises(ValueError, match="exactly one valid slot per row"):
        ranked_returns(ref, mask)
    with pytest.raises(FloatingPointError, match="ref_log_probs"):
        dpo(log_probs, torch.full_like(ref, torch.nan), mask, beta=0.1)
    with pytest.raises(ValueError, match="beta=0 must be"):
        DPO(beta=0)
