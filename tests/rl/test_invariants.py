from __future__ import annotations

import pytest
import torch

from rlmesh.rl.drift import LIMITS
from rlmesh.rl.group_advantages import grpo, rloo
from rlmesh.rl.invariants import (
    EngineGap,
    InvariantViolated,
    name_cause,
    require_centred,
    require_on_policy,
    require_same_loss,
    require_tokens,
)
from rlmesh.rl.losses import aggregate, valid_count

MASK = torch.ones(2, 3, dtype=torch.bool)


def test_a_batch_without_a_token_to_train_on_is_told() -> None:
    require_tokens(MASK)
    with pytest.raises(InvariantViolated, match=r"the batch has no token.*\(2, 3\)"):
        require_tokens(~MASK)


def test_a_ratio_other_than_1_before_the_first_update_is_told_with_its_place() -> None:
    old = torch.randn(2, 3)
    require_on_policy(old + 1e-5, old, MASK)
    new = old.clone()
    new[1, 2] += 0.5
    with pytest.raises(InvariantViolated, match=r"0\.5 at row 1, token 2 .*1 of 6 tokens"):
        require_on_policy(new, old, MASK)
    outside = MASK.clone()
    outside[1, 2] = False
    require_on_policy(new, old, outside)


def test_a_loss_that_depends_on_the_cut_is_told() -> None:
    loss, mask = torch.tensor([[4.0, 0, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
    n = valid_count(mask, "token-mean")

    def whole_by(parts: list[slice], own_count: bool) -> float:
        return sum(
            aggregate(
                loss[p],
                mask[p],
                "token-mean",
                denominator=valid_count(mask[p], "token-mean") * len(parts) if own_count else n,
            ).item()
            for p in parts
        )

    one, two = [slice(0, 2)], [slice(0, 1), slice(1, 2)]
    require_same_loss(whole_by(one, False), whole_by(two, False), cuts=("1 part", "2 parts"))
    with pytest.raises(InvariantViolated, match=r"1\.75 when cut as 1 part and 2\.5 when cut as 2 parts"):
        require_same_loss(whole_by(one, True), whole_by(two, True), cuts=("1 part", "2 parts"))


def test_a_group_whose_advantages_do_not_sum_to_zero_is_told() -> None:
    rewards, groups = torch.tensor([1.0, 0, 0, 5, 6]), torch.tensor([7, 7, 7, 8, 8])
    valid = torch.tensor([True, True, True, True, False])
    for advantages in (grpo(rewards, groups, valid=valid), rloo(rewards, groups, valid=valid)):
        require_centred(advantages, groups, valid=valid)
    with pytest.raises(InvariantViolated, match="group 7"):
        require_centred(grpo(rewards, groups)[1:], groups[1:])
    with pytest.raises(InvariantViolated, match="without a reward"):
        require_centred(grpo(rewards, groups), groups, valid=valid)


def test_causes_of_a_gap_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    trainer, mask = -torch.rand(4, 32, generator=generator), torch.ones(4, 32, dtype=torch.bool)
    limits = LIMITS["bfloat16"]

    def cause(engine: torch.Tensor, **facts: object) -> str:
        return name_cause(EngineGap.of(trainer, engine, mask), limits, **facts)[0]  # type: ignore[arg-type]

    noise = torch.randn(4, 32, generator=generator)
    assert cause(trainer + 1e-4 * noise) == "none"
    assert cause(trainer + 2e-2 * noise) == "dtype"
    assert cause(trainer + 0.3 + 0.01 * noise, truncated=True) == "truncation"
    assert cause(trainer + 0.5 * noise, versions_behind=3) == "stale weights"
    assert cause(trainer, same_prompt=False) == "template"
    first = trainer.clone()
    first[:, 0] += 5
    assert cause(first) == "template"
    assert cause(trainer + 0.5 * noise) == "unknown"
