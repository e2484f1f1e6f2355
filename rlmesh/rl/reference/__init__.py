"""The functions of :mod:`rlmesh.rl` in plain NumPy loops: slow, obvious, and without torch.

The tests hold every torch function against its counterpart here, which has the same name and stands in the module of
the same name. Only valid slots are read, so a masked one may hold anything. Arrays are ``[batch, time]`` and computed
in float64; masked slots of results are 0.
"""

from __future__ import annotations

from rlmesh.rl.reference.advantages import discounted_returns as discounted_returns
from rlmesh.rl.reference.advantages import gae as gae
from rlmesh.rl.reference.advantages import reinforce_plus_plus as reinforce_plus_plus
from rlmesh.rl.reference.correction import correct as correct
from rlmesh.rl.reference.correction import whole_vocabulary as whole_vocabulary
from rlmesh.rl.reference.distillation import sampled_reverse_kl_advantages as sampled_reverse_kl_advantages
from rlmesh.rl.reference.distillation import top_k_kl as top_k_kl
from rlmesh.rl.reference.drift import drift as drift
from rlmesh.rl.reference.estimates import majority_at_k as majority_at_k
from rlmesh.rl.reference.estimates import unbiased_pass_at_k as unbiased_pass_at_k
from rlmesh.rl.reference.group_advantages import dr_grpo as dr_grpo
from rlmesh.rl.reference.group_advantages import grpo as grpo
from rlmesh.rl.reference.group_advantages import opo as opo
from rlmesh.rl.reference.group_advantages import pass_at_k as pass_at_k
from rlmesh.rl.reference.group_advantages import reinforce_plus_plus_baseline as reinforce_plus_plus_baseline
from rlmesh.rl.reference.group_advantages import remax as remax
from rlmesh.rl.reference.group_advantages import rloo as rloo
from rlmesh.rl.reference.group_advantages import spread as spread
from rlmesh.rl.reference.head import entropy as entropy
from rlmesh.rl.reference.head import token_log_probs as token_log_probs
from rlmesh.rl.reference.kl import kl_estimate as kl_estimate
from rlmesh.rl.reference.kl import token_rewards as token_rewards
from rlmesh.rl.reference.losses import aggregate as aggregate
from rlmesh.rl.reference.losses import cispo_loss as cispo_loss
from rlmesh.rl.reference.losses import gspo_loss as gspo_loss
from rlmesh.rl.reference.losses import ppo_clip_loss as ppo_clip_loss
from rlmesh.rl.reference.losses import sapo_loss as sapo_loss
from rlmesh.rl.reference.losses import valid_count as valid_count
from rlmesh.rl.reference.losses import value_clip_loss as value_clip_loss
from rlmesh.rl.reference.masking import masked_mean as masked_mean
from rlmesh.rl.reference.masking import masked_whiten as masked_whiten
from rlmesh.rl.reference.preference import dpo as dpo
from rlmesh.rl.reference.preference import ranked_returns as ranked_returns
from rlmesh.rl.reference.sampling import kept_mass as kept_mass
from rlmesh.rl.reference.sampling import log_distribution as log_distribution
from rlmesh.rl.reference.sampling import penalised as penalised
