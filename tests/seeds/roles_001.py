"""Roles for the job of document 001: small, but they really call each other and check what they were given."""

from __future__ import annotations

import os
from typing import Any

from rlmesh import BaseRLTrainer, BaseRLWorkload, RoleGroup, current_worker, rpc


class TestWorkload(BaseRLWorkload):
    __test__ = False

    @rpc
    def describe(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "rank": self.rank,
            "world_size": self.world_size,
            "node_rank": current_worker().node_rank,
            "config": self.config,
            "env": {name: os.environ.get(name) for name in ("e0", "e1")},
            "torch_rank": os.environ.get("RANK"),
        }

    @rpc
    def compute(self, values: list[int]) -> list[int]:
        return [value * 10 + self.rank for value in values]


class TestActor(TestWorkload):
    @rpc
    def is_actor(self) -> bool:
        return self.is_actor_role() and not self.is_rollout_role()


class TestRollout(TestWorkload): ...


class TestReference(TestWorkload): ...


class TestInteractiveTrainer(BaseRLTrainer):
    """Fails the job if anything is not as the document's chain of calls says."""

    __test__ = False

    def init(self) -> None:
        assert (len(self.actors), len(self.rollouts), len(self.references)) == (2, 2, 2)
        assert (self.rewards, self.critics) == ([], [])
        assert self.config == {"c1": "v1"}
        assert all(actor.call("is_actor").result() for actor in self.actors)

    def fit(self) -> None:
        for role, handles in (("ACTOR", self.actors), ("ROLLOUT", self.rollouts), ("REFERENCE", self.references)):
            told = [handle.call("describe").result() for handle in handles]
            assert [(t["role"], t["rank"], t["world_size"]) for t in told] == [(role, 0, 2), (role, 1, 2)], told
            assert len({t["node_rank"] for t in told}) == 2, told
            assert all(t["config"] == {"c1": "v1"} for t in told), told
            expected = {"e0": "v0", "e1": "v1" if role == "ACTOR" else None}
            assert all(t["env"] == expected for t in told), told
            assert [t["torch_rank"] for t in told] == (["0", "1"] if role == "ACTOR" else [None, None]), told
        computed = RoleGroup("ACTOR").call_batch("compute", 5, [1, 2, 3, 4, 5])
        assert list(computed) == [10, 20, 30, 41, 51], list(computed)
        current_worker().report(step=1, actors=2, reward_mean=1.0)
