"""Checks of environments: faults that make training wrong without a word, and exact replay of episodes."""

from __future__ import annotations

from rlmesh.envs.checks.creation import creator_of
from rlmesh.envs.checks.episodes import CheckPlan
from rlmesh.envs.checks.findings import CHECKS, EnvFinding, EnvReport
from rlmesh.envs.checks.recordings import EpisodeRecording
from rlmesh.envs.checks.watch import CheckDeadlines, check_env

__all__ = [
    "CHECKS", "CheckDeadlines", "CheckPlan", "EnvFinding", "EnvReport", "EpisodeRecording", "check_env", "creator_of",
]  # fmt: skip
