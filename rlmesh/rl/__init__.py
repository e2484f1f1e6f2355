"""The RL layer: from prompts and rewards to gradients.

The maths does not depend on processes: functions take and return tensors, so that each can be read, tested and copied
alone. Engines and their arguments and results are names of this package, which imports their modules on first use:
``from rlmesh.rl import FSDP2Engine, TrainingOptions``. Import the rest from the modules themselves:

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

_WHERE = {
    "AsyncVllmEngine": "rlmesh.rl.engines.vllm.async_engine",
    "DDPEngine": "rlmesh.rl.engines.training.ddp",
    "DeepSpeedEngine": "rlmesh.rl.engines.training.zero",
    "FSDP2Engine": "rlmesh.rl.engines.training.fsdp2",
    "LoraOptions": "rlmesh.rl.engines.lora",
    "RolloutEngine": "rlmesh.rl.engines.rollout",
    "Sample": "rlmesh.rl.engines.rollout",
    "SamplingParams": "rlmesh.rl.engines.rollout",
    "Saving": "rlmesh.rl.engines.training.protocol",
    "StepReport": "rlmesh.rl.engines.training.protocol",
    "TrainingEngine": "rlmesh.rl.engines.training.protocol",
    "TrainingOptions": "rlmesh.rl.engines.training.protocol",
    "TransformersEngine": "rlmesh.rl.engines.transformers",
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
