"""Reinforcement learning in Gymnasium environments, with RLlib's concepts and names, without Ray.

Public names are imported on first use; batches, runners and settings need no torch.

``batches``
    `SampleBatch` and `MultiAgentBatch`: steps as columns; advantages of fragments.
``environments``
    Registered names and creators; vectors of environments in one process, in all three autoreset modes.
``multi_agent``
    Environments of several agents, PettingZoo's among them; policies by agent.
``modules``
    `RLModule`, encoders, distributions of actions; `Policy`.
``runners``
    `EnvRunner`: steps environments with a policy. `EnvRunnerGroup`: one in this process, others in an rlmesh job.
``learners``
    `Learner`: updates a module with batches.
``algorithms``
    `AlgorithmConfig` and `Algorithm`; PPO, VPG, A2C, IMPALA, APPO, DQN, SAC, TD3, BC, MARWIL.
``replay``, ``connectors``, ``checks``, ``offline``
    Replay buffers; steps between environments and policy; faults of environments; recorded steps.
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
    from rlmesh.envs.algorithms.impala import APPO as APPO
    from rlmesh.envs.algorithms.impala import IMPALA as IMPALA
    from rlmesh.envs.algorithms.impala import APPOConfig as APPOConfig
    from rlmesh.envs.algorithms.impala import IMPALAConfig as IMPALAConfig
    from rlmesh.envs.algorithms.marwil import BC as BC
    from rlmesh.envs.algorithms.marwil import MARWIL as MARWIL
    from rlmesh.envs.algorithms.marwil import BCConfig as BCConfig
    from rlmesh.envs.algorithms.marwil import MARWILConfig as MARWILConfig
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
    from rlmesh.envs.modules.multi_agent_module import MultiAgentRLModule as MultiAgentRLModule
    from rlmesh.envs.modules.policy import Policy as Policy
    from rlmesh.envs.modules.rl_module import ActorCriticModule as ActorCriticModule
    from rlmesh.envs.modules.rl_module import RLModule as RLModule
    from rlmesh.envs.multi_agent.environment import MultiAgentEnv as MultiAgentEnv
    from rlmesh.envs.multi_agent.environment import make_multi_agent as make_multi_agent
    from rlmesh.envs.multi_agent.pettingzoo_env import ParallelPettingZooEnv as ParallelPettingZooEnv
    from rlmesh.envs.multi_agent.pettingzoo_env import PettingZooEnv as PettingZooEnv
    from rlmesh.envs.multi_agent.policies import PolicySpec as PolicySpec
    from rlmesh.envs.multi_agent.runner import MultiAgentEnvRunner as MultiAgentEnvRunner
    from rlmesh.envs.runners.env_runner import EnvRunner as EnvRunner
    from rlmesh.envs.runners.env_runner import RolloutWorker as RolloutWorker
    from rlmesh.envs.runners.env_runner_group import EnvRunnerGroup as EnvRunnerGroup
    from rlmesh.envs.runners.env_runner_group import WorkerSet as WorkerSet

_WHERE = {
    "A2C": "rlmesh.envs.algorithms.pg",
    "A2CConfig": "rlmesh.envs.algorithms.pg",
    "APPO": "rlmesh.envs.algorithms.impala",
    "APPOConfig": "rlmesh.envs.algorithms.impala",
    "BC": "rlmesh.envs.algorithms.marwil",
    "BCConfig": "rlmesh.envs.algorithms.marwil",
    "IMPALA": "rlmesh.envs.algorithms.impala",
    "IMPALAConfig": "rlmesh.envs.algorithms.impala",
    "MARWIL": "rlmesh.envs.algorithms.marwil",
    "MARWILConfig": "rlmesh.envs.algorithms.marwil",
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
    "MultiAgentEnv": "rlmesh.envs.multi_agent.environment",
    "MultiAgentEnvRunner": "rlmesh.envs.multi_agent.runner",
    "MultiAgentRLModule": "rlmesh.envs.modules.multi_agent_module",
    "PG": "rlmesh.envs.algorithms.pg",
    "PGConfig": "rlmesh.envs.algorithms.pg",
    "PPO": "rlmesh.envs.algorithms.ppo",
    "PolicyClient": "rlmesh.envs.external.client",
    "PPOConfig": "rlmesh.envs.algorithms.ppo",
    "ParallelPettingZooEnv": "rlmesh.envs.multi_agent.pettingzoo_env",
    "PettingZooEnv": "rlmesh.envs.multi_agent.pettingzoo_env",
    "Policy": "rlmesh.envs.modules.policy",
    "PolicySpec": "rlmesh.envs.multi_agent.policies",
    "RLModule": "rlmesh.envs.modules.rl_module",
    "ResultDict": "rlmesh.envs.algorithms.results",
    "RolloutWorker": "rlmesh.envs.runners.env_runner",
    "SampleBatch": "rlmesh.envs.batches.sample_batch",
    "VPG": "rlmesh.envs.algorithms.pg",
    "VPGConfig": "rlmesh.envs.algorithms.pg",
    "WorkerSet": "rlmesh.envs.runners.env_runner_group",
    "get_algorithm_class": "rlmesh.envs.algorithms.named",
    "make_multi_agent": "rlmesh.envs.multi_agent.environment",
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
