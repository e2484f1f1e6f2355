"""The RL layer: from prompts and rewards to gradients.

The maths does not depend on processes: functions take and return tensors, so that each can be read, tested and copied
alone. A training needs the names of this package, which imports their modules on first use:
``from rlmesh.rl import GRPO, Run``. They are the run and its settings, algorithms, rewards, and engines with their
arguments and results. Import the rest from the modules themselves:

``types``
    Turns, episodes and groups: token ids with a source, from which masks are derived; outcomes of rewards.
``packing``, ``balance``, ``prefix``
    Episodes in rows without padding, distributed over ranks, the prompt of a group computed once; attention over them.
``masking``
    Means, sums and whitening over the valid tokens only, and checks that wait for the device once per step.
``kl``
    Estimators of the divergence from the reference policy, and rewards that carry it as a penalty.
``advantages``
    Returns and advantages per token: discounted returns, generalized advantage estimation, REINFORCE++.
``group_advantages``
    Advantages per response, by comparison within groups: GRPO, Dr. GRPO, RLOO, ReMax, OPO, pass@k.
``head``
    Log-probabilities and entropy, from logits, or from hidden states in chunks.
``losses``
    Losses of policy (PPO, GSPO, CISPO, SAPO) and critic, and sums that do not depend on how a batch is split.
``correction``
    Importance weights for samples of an engine whose policy differs slightly from the trainer's.
``distillation``
    Divergences from a teacher.
``drift``
    The gap between an engine's log-probabilities and the trainer's, and an alarm.
``invariants``
    Facts that hold at every step of a healthy run, as checks.
``algorithms``, ``components``
    Weights of the three components of the loss (policy, likelihood, divergence), and that loss on packed rows.
``rewards``, ``data``
    Functions that score responses, and prompts from files.
``engines``
    Rollout and training engines, behind protocols.
``reference``
    The same functions as plain NumPy loops, for tests and readers; needs no torch.

A batch is ``[batch, time]``, where time counts the tokens of the response, and a mask is True where the token counts.
The content of a masked slot, NaN included, changes neither values nor gradients. NaN or infinity in a valid slot raises
:class:`FloatingPointError` that names the argument and the index.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmesh.rl.algorithms.choices import Correction as Correction
    from rlmesh.rl.algorithms.grpo import GRPO as GRPO
    from rlmesh.rl.algorithms.pairs import DPO as DPO
    from rlmesh.rl.algorithms.pairs import RewardModelling as RewardModelling
    from rlmesh.rl.algorithms.ppo import PPO as PPO
    from rlmesh.rl.algorithms.ppo import ReinforcePlusPlus as ReinforcePlusPlus
    from rlmesh.rl.algorithms.supervised import SFT as SFT
    from rlmesh.rl.algorithms.supervised import BehaviourCloning as BehaviourCloning
    from rlmesh.rl.algorithms.supervised import OnPolicyDistillation as OnPolicyDistillation
    from rlmesh.rl.engines.lora import LoraOptions as LoraOptions
    from rlmesh.rl.engines.rollout import RolloutEngine as RolloutEngine
    from rlmesh.rl.engines.rollout import Sample as Sample
    from rlmesh.rl.engines.rollout import SamplingParams as SamplingParams
    from rlmesh.rl.engines.training.ddp import DDPEngine as DDPEngine
    from rlmesh.rl.engines.training.fsdp2 import FSDP2Engine as FSDP2Engine
    from rlmesh.rl.engines.training.protocol import Saving as Saving
    from rlmesh.rl.engines.training.protocol import StepReport as StepReport
    from rlmesh.rl.engines.training.protocol import TrainingEngine as TrainingEngine
    from rlmesh.rl.engines.training.protocol import TrainingOptions as TrainingOptions
    from rlmesh.rl.engines.training.zero import DeepSpeedEngine as DeepSpeedEngine
    from rlmesh.rl.engines.transformers import TransformersEngine as TransformersEngine
    from rlmesh.rl.engines.vllm.async_engine import AsyncVllmEngine as AsyncVllmEngine
    from rlmesh.rl.engines.vllm.sync_engine import VllmEngine as VllmEngine
    from rlmesh.rl.evaluation.settings import ValidationSettings as ValidationSettings
    from rlmesh.rl.rewards.model import RewardModel as RewardModel
    from rlmesh.rl.rewards.reward import Reward as Reward
    from rlmesh.rl.rollout.episodes.settings import EpisodeSettings as EpisodeSettings
    from rlmesh.rl.trainers.run import Run as Run
    from rlmesh.rl.trainers.run import RunResult as RunResult
    from rlmesh.rl.trainers.settings import ActorSettings as ActorSettings
    from rlmesh.rl.trainers.settings import CriticSettings as CriticSettings
    from rlmesh.rl.trainers.settings import LoraSettings as LoraSettings
    from rlmesh.rl.trainers.settings import ReferenceSettings as ReferenceSettings
    from rlmesh.rl.trainers.settings import RolloutSettings as RolloutSettings
    from rlmesh.rl.types import Abstain as Abstain
    from rlmesh.rl.types import Score as Score

_WHERE = {
    "Abstain": "rlmesh.rl.types",
    "ActorSettings": "rlmesh.rl.trainers.settings",
    "AsyncVllmEngine": "rlmesh.rl.engines.vllm.async_engine",
    "BehaviourCloning": "rlmesh.rl.algorithms.supervised",
    "Correction": "rlmesh.rl.algorithms.choices",
    "CriticSettings": "rlmesh.rl.trainers.settings",
    "DDPEngine": "rlmesh.rl.engines.training.ddp",
    "DPO": "rlmesh.rl.algorithms.pairs",
    "DeepSpeedEngine": "rlmesh.rl.engines.training.zero",
    "EpisodeSettings": "rlmesh.rl.rollout.episodes.settings",
    "FSDP2Engine": "rlmesh.rl.engines.training.fsdp2",
    "GRPO": "rlmesh.rl.algorithms.grpo",
    "LoraOptions": "rlmesh.rl.engines.lora",
    "LoraSettings": "rlmesh.rl.trainers.settings",
    "OnPolicyDistillation": "rlmesh.rl.algorithms.supervised",
    "PPO": "rlmesh.rl.algorithms.ppo",
    "ReferenceSettings": "rlmesh.rl.trainers.settings",
    "ReinforcePlusPlus": "rlmesh.rl.algorithms.ppo",
    "Reward": "rlmesh.rl.rewards.reward",
    "RewardModel": "rlmesh.rl.rewards.model",
    "RewardModelling": "rlmesh.rl.algorithms.pairs",
    "RolloutEngine": "rlmesh.rl.engines.rollout",
    "RolloutSettings": "rlmesh.rl.trainers.settings",
    "Run": "rlmesh.rl.trainers.run",
    "RunResult": "rlmesh.rl.trainers.run",
    "SFT": "rlmesh.rl.algorithms.supervised",
    "Sample": "rlmesh.rl.engines.rollout",
    "SamplingParams": "rlmesh.rl.engines.rollout",
    "Saving": "rlmesh.rl.engines.training.protocol",
    "Score": "rlmesh.rl.types",
    "StepReport": "rlmesh.rl.engines.training.protocol",
    "TrainingEngine": "rlmesh.rl.engines.training.protocol",
    "TrainingOptions": "rlmesh.rl.engines.training.protocol",
    "TransformersEngine": "rlmesh.rl.engines.transformers",
    "ValidationSettings": "rlmesh.rl.evaluation.settings",
    "VllmEngine": "rlmesh.rl.engines.vllm.sync_engine",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'rlmesh.rl' has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
