"""`judge`: decides whether a scored group is trained, dropped or failed. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from rlmesh.rl.rollout.requests import Verdict
from rlmesh.rl.types import EQUAL, Episode, Failed, Group, Outcome, Score

__all__ = ["judge"]


def judge(group: Group, total: Callable[[Episode], Outcome], *, dynamic: bool, died: str) -> Verdict:
    """The verdict on a scored group.

    Args:
        group: the group with outcomes.
        total: function that gives the combined outcome of an episode's rewards.
        dynamic: drop groups whose responses all have the same reward, since they have no advantage (dynamic sampling of
            DAPO; Yu et al. 2025, arXiv:2503.14476).
        died: the beginning of a failure's reason if the scorer's process died.
    """
    outcomes = [outcome for episode in group.episodes for outcome in episode.outcomes.values()]
    for outcome in outcomes:
        if isinstance(outcome, Failed) and died in outcome.reason:
            return Verdict("died", outcome.reason)
    totals = [total(episode) for episode in group.episodes]
    scores = [one.value for one in totals if isinstance(one, Score)]
    if not scores:
        return Verdict("failed", f"no response has a reward; the first: {totals[0]}")
    if dynamic and max(scores) - min(scores) <= EQUAL:
        return Verdict("dropped", f"all responses have the reward {scores[0]:g}")
    return Verdict("kept")
