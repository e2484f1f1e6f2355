"""A replay buffer as a role, used from another member."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlmesh.envs.replay import PrioritizedReplayBuffer, RemoteReplay, ReplayBuffer, ReplayRole
from rlmesh.errors import UsageError
from rlmesh.testing import InProcessCluster
from tests.envs.replay.batches import transitions


class Prioritized(ReplayRole):
    def make(self) -> Any:
        return PrioritizedReplayBuffer(50, seed=self.rank)


class Uniform(ReplayRole):
    def make(self) -> Any:
        return ReplayBuffer(50, seed=self.rank)


def test_the_client_does_what_the_buffer_does() -> None:
    local = PrioritizedReplayBuffer(50, seed=1)
    with InProcessCluster() as cluster:
        replay = RemoteReplay(cluster.add("REPLAY", Prioritized, total=2), rank=1)
        with pytest.raises(UsageError, match="empty; add batches first"):
            replay.sample(1)
        assert replay.add(transitions(0, 60)) == 50
        local.add(transitions(0, 60))
        saved = replay.state()
        for _ in range(2):
            for _ in range(3):
                ours, theirs = local.sample(8, beta=0.9), replay.sample(8, beta=0.9)
                assert ours.keys() == theirs.keys()
                for name in ours:
                    assert np.array_equal(ours[name], theirs[name])
                for buffer in (local, replay):
                    assert buffer.update_priorities(ours["batch_indexes"], ours["rewards"]) == 8
            local.restore(saved)
            replay.restore(saved)
        assert len(replay) == 50
        assert len(RemoteReplay("REPLAY", rank=0)) == 0


def test_priorities_of_a_uniform_buffer_are_refused() -> None:
    with InProcessCluster() as cluster:
        replay = RemoteReplay(cluster.add("REPLAY", Uniform))
        replay.add(transitions(0, 3))
        with pytest.raises(UsageError, match="REPLAY:0: ReplayBuffer has no priorities"):
            replay.update_priorities([0], [1.0])


def test_a_role_without_a_buffer_is_told_to_make_one() -> None:
    with pytest.raises(UsageError, match=r"ReplayRole has no buffer: write `make\(self\)`"):
        ReplayRole().setup()
