"""Replay buffers: transitions of the past, from which off-policy algorithms sample.

| class | samples |
|---|---|
| `ReplayBuffer` | transitions, uniformly; with returns of n steps |
| `PrioritizedReplayBuffer` | transitions in proportion to their priority |
| `SequenceReplayBuffer` | consecutive steps of episodes, for recurrent modules |
| `PrioritizedSequenceReplayBuffer` | such steps in proportion to the priority of the sequence |
| `MultiAgentReplayBuffer` | from one buffer per policy |

`ReplayRole` serves a buffer as a role of a job, and `RemoteReplay` is its client.
"""

from __future__ import annotations

from rlmesh.envs.replay.multi_agent import MultiAgentReplayBuffer
from rlmesh.envs.replay.prioritized import PrioritizedReplayBuffer
from rlmesh.envs.replay.prioritized_sequences import PrioritizedSequenceReplayBuffer
from rlmesh.envs.replay.role import RemoteReplay, ReplayRole
from rlmesh.envs.replay.sequences import SequenceReplayBuffer
from rlmesh.envs.replay.uniform import ReplayBuffer

__all__ = [
    "MultiAgentReplayBuffer", "PrioritizedReplayBuffer", "PrioritizedSequenceReplayBuffer", "RemoteReplay",
    "ReplayBuffer", "ReplayRole", "SequenceReplayBuffer",
]  # fmt: skip
