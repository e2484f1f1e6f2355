"""Reinforcement learning in Gymnasium environments, with RLlib's concepts and names, without Ray.

Public names are imported on first use; batches, runners and settings need no torch.

``batches``
    `SampleBatch` and `MultiAgentBatch`: steps as columns; advantages of fragments.
``environments``
    Registered names and creators; vectors of environments in one process, in all three autoreset modes.
``modules``
    `RLModule`, encoders, distributions of actions; `Policy`.
``runners``
    `EnvRunner`: steps environments with a policy. `EnvRunnerGroup`: one in this process, others in an rlmesh job.
``learners``
    `Learner`: updates a module with batches.
``algorithms``
    `AlgorithmConfig` and `Algorithm`; PPO, VPG, A2C, DQN, SAC, TD3.
``replay``, ``connectors``, ``checks``
    Replay buffers; steps between environments and policy; faults of environments.
``external``, ``recording``
    Simulators that connect to the job; episodes as pictures.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmesh.envs.algorithms.algorithm import Algorithm as Algorithm
    from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig as AlgorithmConfig
    from rlmesh.envs.algorithms.continuous import SAC as SAC
    from rlmesh.envs.algorithms.continuous import TD3 as TD3
    from rlmesh.envs.algorithms.continuous import SACConfig as SACConfig
    from rlmesh.envs.algorithms.continuous import TD3Config as TD3Config
    from rlmesh.envs.algorithms.dqn import DQN as DQN
    from rlmesh.envs.algorithms.dqn import DQNConfig as DQNConfig
    from rlmesh.envs.algorithms.named import get_algorithm_class as get_algorithm_class
    from rlmesh.envs.algorithms.pg import A2C as A2C
    from rlmesh.envs.algorithms.pg import PG as PG
    from rlmesh.envs.algorithms.pg import VPG as VPG
    from rlmesh.envs.algorithms.pg import A2CConfig as A2CConfig
    from rlmesh.envs.algorithms.pg import PGConfig as PGConfig
    from rlmesh.envs.algorithms.pg import VPGConfig as VPGConfig
    from rlmesh.envs.algorithms.ppo import PPO as PPO
    from rlmesh.envs.algorithms.ppo import PPOConfig as PPOConfig
    from rlmesh.envs.algorithms.results import ResultDict as ResultDict
    from rlmesh.envs.algorithms.train_ops import multi_gpu_train_one_step as multi_gpu_train_one_step
    from rlmesh.envs.algorithms.train_ops import synchronous_parallel_sample as synchronous_parallel_sample
    from rlmesh.envs.algorithms.train_ops import train_one_step as train_one_step
    from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch as MultiAgentBatch
    from rlmesh.envs.batches.sample_batch import SampleBatch as SampleBatch
    from rlmesh.envs.environments.registry import EnvContext as EnvContext
    from rlmesh.envs.environments.registry import register_env as register_env
    from rlmesh.envs.external.client import ExternalEnvClient as ExternalEnvClient
    from rlmesh.envs.external.client import PolicyClient as PolicyClient
    from rlmesh.envs.external.spec import EpisodeLost as EpisodeLost
    from rlmesh.envs.external.spec import ExternalEnv as ExternalEnv
    from rlmesh.envs.learners.learner import Learner as Learner
    from rlmesh.envs.learners.learner_group import LearnerGroup as LearnerGroup
    from rlmesh.envs.modules.module_policy import ModulePolicy as ModulePolicy
    from rlmesh.envs.modules.policy import Policy as Policy
    from rlmesh.envs.modules.rl_module import ActorCriticModule as ActorCriticModule
    from rlmesh.envs.modules.rl_module import RLModule as RLModule
    from rlmesh.envs.runners.env_runner import EnvRunner as EnvRunner
    from rlmesh.envs.runners.env_runner import RolloutWorker as RolloutWorker
    from rlmesh.envs.runners.env_runner_group import EnvRunnerGroup as EnvRunnerGroup
    from rlmesh.envs.runners.env_runner_group import WorkerSet as WorkerSet

_WHERE = {
    "A2C": "rlmesh.envs.algorithms.pg",
    "A2CConfig": "rlmesh.envs.algorithms.pg",
    "ActorCriticModule": "rlmesh.envs.modules.rl_module",
    "Algorithm": "rlmesh.envs.algorithms.algorithm",
    "AlgorithmConfig": "rlmesh.envs.algorithms.algorithm_config",
    "DQN": "rlmesh.envs.algorithms.dqn",
    "DQNConfig": "rlmesh.envs.algorithms.dqn",
    "SAC": "rlmesh.envs.algorithms.continuous",
    "SACConfig": "rlmesh.envs.algorithms.continuous",
    "TD3": "rlmesh.envs.algorithms.continuous",
    "TD3Config": "rlmesh.envs.algorithms.continuous",
    "EnvContext": "rlmesh.envs.environments.registry",
    "EnvRunner": "rlmesh.envs.runners.env_runner",
    "EnvRunnerGroup": "rlmesh.envs.runners.env_runner_group",
    "EpisodeLost": "rlmesh.envs.external.spec",
    "ExternalEnv": "rlmesh.envs.external.spec",
    "ExternalEnvClient": "rlmesh.envs.external.client",
    "Learner": "rlmesh.envs.learners.learner",
    "LearnerGroup": "rlmesh.envs.learners.learner_group",
    "ModulePolicy": "rlmesh.envs.modules.module_policy",
    "MultiAgentBatch": "rlmesh.envs.batches.multi_agent_batch",
    "PG": "rlmesh.envs.algorithms.pg",
    "PGConfig": "rlmesh.envs.algorithms.pg",
    "PPO": "rlmesh.envs.algorithms.ppo",
    "PolicyClient": "rlmesh.envs.external.client",
    "PPOConfig": "rlmesh.envs.algorithms.ppo",
    "Policy": "rlmesh.envs.modules.policy",
    "RLModule": "rlmesh.envs.modules.rl_module",
    "ResultDict": "rlmesh.envs.algorithms.results",
    "RolloutWorker": "rlmesh.envs.runners.env_runner",
    "SampleBatch": "rlmesh.envs.batches.sample_batch",
    "VPG": "rlmesh.envs.algorithms.pg",
    "VPGConfig": "rlmesh.envs.algorithms.pg",
    "WorkerSet": "rlmesh.envs.runners.env_runner_group",
    "get_algorithm_class": "rlmesh.envs.algorithms.named",
    "multi_gpu_train_one_step": "rlmesh.envs.algorithms.train_ops",
    "register_env": "rlmesh.envs.environments.registry",
    "synchronous_parallel_sample": "rlmesh.envs.algorithms.train_ops",
    "train_one_step": "rlmesh.envs.algorithms.train_ops",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'rlmesh.envs' has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
