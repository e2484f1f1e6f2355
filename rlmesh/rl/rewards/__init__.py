"""Rewards: functions that score responses, run safely, and combined.

An outcome is `Score`, `Abstain` or `Failed`. A failed response leaves its group and is counted; its reward is not 0.

::

    rewards = Rewards([Reward(gsm8k.compute_score), Reward(brief, weight=0.1)], tokenizer)
    groups = rewards.score(groups)

``gsm8k``, ``math``, ``exact``
    Ready-made functions; each is a ``compute_score(solution_str, ground_truth)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlmesh.rl.rewards.reward import Response, Reward
from rlmesh.rl.types import Abstain, Failed, Score

if TYPE_CHECKING:
    from rlmesh.rl.rewards.scoring import Rewards

__all__ = ["Abstain", "Failed", "Response", "Reward", "Rewards", "Score"]


def __getattr__(name: str) -> Any:
    """Import on first use, since `Rewards` needs more packages."""
    if name == "Rewards":
        from rlmesh.rl.rewards.scoring import Rewards

        return Rewards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
