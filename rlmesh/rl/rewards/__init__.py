"""Rewards: functions that score responses, run safely, and combined.

An outcome is `Score`, `Abstain` or `Failed`. A failed response leaves its group and is counted; its reward is not 0.

::

    rewards = Rewards([Reward(gsm8k.compute_score), Reward(brief, weight=0.1)], tokenizer)
    groups = rewards.score(groups)

``gsm8k``, ``math``, ``exact``, ``code``
    Ready-made functions; each is a ``compute_score(solution_str, ground_truth)``.
`RewardManager`
    Selects the function by the row's ``data_source``.
`RewardModel`
    A model that scores, served by a role of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlmesh.rl.rewards.reward import Response, Reward
from rlmesh.rl.types import Abstain, Failed, Score

if TYPE_CHECKING:
    from rlmesh.rl.rewards.manager import RewardManager
    from rlmesh.rl.rewards.model import RewardModel
    from rlmesh.rl.rewards.scoring import Rewards

__all__ = ["Abstain", "Failed", "Response", "Reward", "RewardManager", "RewardModel", "Rewards", "Score"]

_WHERE = {
    "RewardManager": "rlmesh.rl.rewards.manager",
    "RewardModel": "rlmesh.rl.rewards.model",
    "Rewards": "rlmesh.rl.rewards.scoring",
}


def __getattr__(name: str) -> Any:
    """Import names that need optional packages on first use."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
