"""The role of remote runners whose policies use torch.

The node finds torch among this module's imports, and imports it once, before it forks workers: a runner that restarts
then needs milliseconds instead of seconds.
"""

from __future__ import annotations

import gymnasium as gymnasium
import torch

from rlmesh.envs.modules.module_policy import ModulePolicy as ModulePolicy
from rlmesh.envs.runners.remote import RemoteEnvRunner

__all__ = ["TorchEnvRunner"]


class TorchEnvRunner(RemoteEnvRunner):
    """A remote runner with torch on one thread: runners share the cores, and their networks are small."""

    def setup(self) -> None:
        torch.set_num_threads(1)
        super().setup()
