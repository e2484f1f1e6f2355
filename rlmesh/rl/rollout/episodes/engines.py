"""`EpisodeEngines`: lets a `Sampler` use the members of a role that play episodes of several turns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlmesh import WeightSync
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.rollout.role_engines import RoleEngines
from rlmesh.rl.types import Episode

__all__ = ["EpisodeEngines"]


class EpisodeEngines(RoleEngines):
    """Members that play episodes. If an engine dies, its groups are played again, like any groups.

    Args:
        group: the members (:class:`rlmesh.rl.roles.sampling.SamplingRole`).
        params: parameters of each turn; the seeds come with the requests.
        in_turn: True if the members share their devices with other roles, and take turns.
        sync: pushes weights to the members; None: pushes go to all of them.
    """

    def __init__(self, group: Any, params: SamplingParams, *, in_turn: bool, sync: WeightSync | None = None) -> None:
        super().__init__(group, params, in_turn=in_turn, sync=sync)
        self._method = "play_groups_in_turn" if in_turn else "play_groups"

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        future: Future[Any] = self._group[self.place(rank)].call(self._method, requests, self._params)
        return future

    def episodes(self, result: Any) -> list[list[Episode]]:
        found: list[list[Episode]] = result
        return found
