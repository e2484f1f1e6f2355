"""Several optimizer steps per pass: their losses have that of the batch as their mean; steps, rates and lost steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl.algorithms import GRPO, PPO, Evaluated
from rlmesh.rl.components import policy_share
from rlmesh.rl.engines.training.packed import PackedInputs, prepare
from rlmesh.rl.packing import Tokens, pack
from rlmesh.rl.trainers.batches import evaluated_of, joined, lengths_of, packs_of, shares_of
from rlmesh.rl.trainers.settings import ActorSettings
from rlmesh.rl.types import Group, Score
from tests.rl.episodes import Episodes, episodes_of, groups_of_episodes, padded
from tests.rl.test_packed_forward import make

DRAWN = episodes_of([(3, [4, 0, 7]), (9, [6, 10, 3]), (5, [1, 2]), (2, [6, 6, 1]), (4, [3])], 11)


def evaluated(drawn: Episodes) -> Evaluated:
    random = np.random.default_rng(3)
    mask = padded([episode.mask for episode in drawn.episodes], fill=False)
    old = torch.from_numpy(random.normal(size=mask.shape))
    return Evaluated(
        mask=mask,
        groups=torch.tensor(drawn.groups),
        rewards=torch.from_numpy(random.normal(size=len(drawn.groups))),
        valid=torch.ones(len(drawn.groups), dtype=torch.bool),
        log_probs=old,
        sampled_log_probs=old,
        values=old,
    )


@given(groups_of_episodes(), st.integers(1, 5), st.integers(1, 3), st.integers(8, 40))
def test_each_step_has_its_own_groups_and_all_of_them_are_the_batch(
    drawn: Episodes, minibatches: int, ranks: int, budget: int
) -> None:
    parts = packs_of(drawn.episodes, drawn.groups, minibatches=minibatches, token_budget=budget, ranks=ranks)
    whole = pack(drawn.episodes, groups=drawn.groups, token_budget=budget, ranks=ranks)
    assert len(parts) == minibatches

    def targets(by_rank: object) -> list[tuple[int, int, int]]:
        return sorted(
            (int(row), int(place), int(target))
            for own in by_rank  # type: ignore[attr-defined]
            for one in own
            for row, place, target in zip(one.rows, one.places, one.targets, strict=True)
        )

    assert targets(joined(parts).by_rank) == targets(whole.by_rank)
    assert joined(parts).episode_tokens == whole.episode_tokens
    groups = [{drawn.groups[row] for own in part.by_rank for one in own for row in one.rows} for part in parts]
    assert sum(map(len, groups)) == len(set().union(*groups)), "no group is in two steps"
    for part in parts:
        assert len({len(own) for own in part.by_rank}) == 1, "all ranks have equally many packs"


@pytest.mark.parametrize(
    "algorithm", [PPO(), GRPO(samples=2, loss="dr_grpo", constant=6.0), GRPO(samples=2, loss="gspo")]
)
@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_the_mean_loss_of_the_steps_is_the_loss_of_the_batch(algorithm: PPO | GRPO, minibatches: int) -> None:
    batch = evaluated(DRAWN)
    weights = algorithm.weigh(batch)
    model = make("qwen2")
    prepare(model)
    found = []
    for count in (1, minibatches):
        total = 0.0
        for packs in packs_of(DRAWN.episodes, DRAWN.groups, minibatches=count, token_budget=30, ranks=2):
            for share in shares_of(packs, batch, weights, minibatches=count):
                for one, columns in zip(share.packs, share.columns, strict=True):
                    terms = model(packed=PackedInputs(one, "cpu"))
                    total += policy_share(terms, columns, share.normalisers, algorithm)[0].item()
        found.append(total / count)
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def test_the_learning_rate_rises_and_falls_over_the_optimizer_steps() -> None:
    settings = ActorSettings(warmup_steps=10, final_lr=0.1, epochs=2, minibatches=3)
    assert settings.updates == 6
    shares = [settings.lr_share(update, 100) for update in range(600)]
    assert shares[0] == pytest.approx(1 / 60) and shares[:55] == sorted(shares[:55])
    assert max(shares) == pytest.approx(0.9175, abs=0.002)
    assert shares[55:] == sorted(shares[55:], reverse=True)
    assert settings.lr_share(600, 100) == pytest.approx(0.1)
    assert settings.lr_share(700, 100) == pytest.approx(0.1)
    assert {ActorSettings().lr_share(update, 5) for update in range(9)} == {1.0}


def test_an_episode_that_its_limit_of_turns_ended_is_cut_off_as_one_of_tokens_or_time() -> None:
    reasons = ["stop", "length", "time", "max_turns"]
    episodes = [
        replace(one, finish_reason=reason) for one, reason in zip(DRAWN.episodes[: len(reasons)], reasons, strict=True)
    ]
    given = evaluated_of(episodes, Tokens.of(episodes), [0, 0, 1, 1], [Score(1.0)] * 4, None, {}, version=0)
    assert given.cut_off is not None and given.cut_off.tolist() == [False, True, True, True]
    skipped = GRPO(samples=2, skip_cut_off=True).weigh(given)
    assert skipped.policy.any(1).tolist() == [True, False, False, False]
    assert lengths_of([Group((0, 0), tuple(episodes))])["cut_off_share"] == 0.75
