"""Numbers of settings without a meaning: each is refused with its name, its value and the range."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms.choices import Correction
from rlmesh.rl.algorithms.grpo import GRPO
from rlmesh.rl.algorithms.pairs import DPO
from rlmesh.rl.algorithms.ppo import PPO
from rlmesh.rl.algorithms.supervised import BehaviourCloning
from rlmesh.rl.trainers.run import Run

NAN, INF = math.nan, math.inf


def score(response: str) -> float:
    return float(len(response))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"actor": {"lr": 1e10}}, "actor.lr=10000000000.0 must be ≤ 1"),
        ({"actor": {"lr": NAN}}, "actor.lr=nan must be"),
        ({"actor": {"weight_decay": 2.0}}, "actor.weight_decay=2.0 must be ≤ 1"),
        ({"actor": {"ranks": 10**6}}, "actor.ranks=1000000 must be ≤ 10000"),
        ({"critic": {"lr": 2.0}}, "critic.lr=2.0 must be ≤ 1"),
        ({"rollout": {"temperature": 1e-30}}, "rollout.temperature=1e-30 must be in [0.01, 100]"),
        ({"rollout": {"temperature": 1e10}}, "rollout.temperature=10000000000.0 must be in [0.01, 100]"),
        ({"rollout": {"engines": 10**6}}, "rollout.engines=1000000 must be ≤ 10000"),
        ({"rollout": {"threads": 10**6}}, "rollout.threads=1000000 must be ≤ 1024"),
        ({"evaluation": {"temperature": 1e-30}}, "evaluation.temperature=1e-30 must be in [0.01, 100], or 0"),
        ({"nodes": 10**6}, "nodes=1000000 must be ≤ 10000"), ({"seed": 2**64}, "seed=18446744073709551616 must be ≤"),
        ({"reward_workers": 10**6}, "reward_workers=1000000 must be ≤ 1024"),
    ],
)  # fmt: skip
def test_numbers_of_a_run(changes: dict[str, Any], text: str) -> None:
    run = Run("model", "data.parquet", GRPO(), [score])
    given = {
        name: dataclasses.replace(getattr(run, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(run, **given)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (GRPO, {"kl": 1e10}, "kl=10000000000.0 must be ≤ 1e"), (GRPO, {"eps": 1e10}, "eps=10000000000.0 must be a num"),
        (GRPO, {"k": 0}, "k=0: a whole number from 1"), (GRPO, {"k": NAN}, "k=nan: a whole number from 1"),
        (GRPO, {"advantage": "pass_at_k", "k": 9}, "k=9: a whole number from 1 to samples=8"),
        (GRPO, {"correction": 0}, "correction=0: use one of token"),
        (PPO, {"correction": NAN}, "correction=nan: use one"),
        (PPO, {"entropy": INF}, "entropy=inf must be a number"), (PPO, {"gamma": 1.5}, r"gamma=1.5: in [0, 1]"),
        (DPO, {"beta": NAN}, "beta=nan must be > 0 and ≤ 1000"), (DPO, {"beta": 0}, "beta=0 must be > 0"),
        (BehaviourCloning, {"at_least": NAN}, "at_least=nan must be a number"),
        (Correction, {"upper": NAN}, "upper must be ≥ 1"),
    ],
)  # fmt: skip
def test_numbers_of_algorithms(kind: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind(**settings)
    assert text in str(caught.value)


def test_values_with_a_meaning_are_kept() -> None:
    assert Correction(upper=INF).upper == INF
    assert GRPO(correction="token").correction == Correction("token")
    run = Run("model", "data.parquet", GRPO(), [score])
    assert dataclasses.replace(run, actor=dataclasses.replace(run.actor, lr=0.0)).actor.lr == 0
