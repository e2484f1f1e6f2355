"""The functions of :mod:`rlmesh.rl` in plain NumPy loops: slow, obvious, and without torch.

The tests hold every torch function against its counterpart here, which has the same name and stands in the module of
the same name. Only valid slots are read, so a masked one may hold anything. Arrays are ``[batch, time]`` and computed
in float64; masked slots of results are 0.
"""

from __future__ import annotations

from rlmesh.rl.reference.advantages import discounted_returns, gae, reinforce_plus_plus
from rlmesh.rl.reference.correction import correct, whole_vocabulary
from rlmesh.rl.reference.distillation import sampled_reverse_kl_advantages, top_k_kl
from rlmesh.rl.reference.drift import drift
from rlmesh.rl.reference.group_advantages import (
    dr_grpo,
    grpo,
    opo,
    pass_at_k,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    spread,
)
from rlmesh.rl.reference.head import entropy, token_log_probs
from rlmesh.rl.reference.kl import kl_estimate, token_rewards
from rlmesh.rl.reference.losses import (
    aggregate,
    cispo_loss,
    gspo_loss,
    ppo_clip_loss,
    sapo_loss,
    valid_count,
    value_clip_loss,
)
from rlmesh.rl.reference.masking import masked_mean, masked_whiten

__all__ = [
    "aggregate",
    "cispo_loss",
    "correct",
    "discounted_returns",
    "dr_grpo",
    "drift",
    "entropy",
    "gae",
    "grpo",
    "gspo_loss",
    "kl_estimate",
    "masked_mean",
    "masked_whiten",
    "opo",
    "pass_at_k",
    "ppo_clip_loss",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sampled_reverse_kl_advantages",
    "sapo_loss",
    "spread",
    "token_log_probs",
    "token_rewards",
    "top_k_kl",
    "valid_count",
    "value_clip_loss",
    "whole_vocabulary",
]
