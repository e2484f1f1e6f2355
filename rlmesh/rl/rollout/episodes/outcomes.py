"""Reward functions for rewards from the episode itself: the return of an environment, and the result of an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlmesh.rl.types import Abstain, Score

if TYPE_CHECKING:
    from rlmesh.rl.rewards.reward import Response

__all__ = ["agent_result", "episode_return"]


def episode_return(sample: Response) -> Score | Abstain:
    """The sum of the rewards of an environment's turns, as a reward function: ``Run(rewards=[episode_return], …)``."""
    found = sample.episode.extras.get("return")
    return Abstain("no environment gave rewards") if found is None else Score(float(found))


def agent_result(sample: Response) -> object:
    """The value that the agent's function returned, as a reward function; see
    :func:`rlmesh.rl.rewards.outcomes.to_outcome` for the values that it may return."""
    return sample.episode.extras.get("result")
