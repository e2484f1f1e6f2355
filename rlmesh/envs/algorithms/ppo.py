"""PPO: proximal policy optimization (Schulman et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rlmesh.envs.algorithms.algorithm import Algorithm
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.algorithms.pg import ACTOR_CRITIC
from rlmesh.envs.settings.allowed import WEIGHT, Allowed, number, optional, schedule

if TYPE_CHECKING:
    from rlmesh.envs.learners.learner import Learner

__all__ = ["PPO", "PPOConfig"]


CLIP = schedule(number(0, 1, above=True), number(0, 1))
"""Half the width of the interval around ratio 1, which a schedule may bring down to 0."""
STANDARDIZED = Allowed("True, False or 'batch'", lambda value: isinstance(value, bool) or value == "batch")
KL: dict[str, Allowed] = {"kl_coeff": WEIGHT, "kl_target": number(0, 100, above=True)}
"""With a target of 0, which no update reaches, the coefficient would grow without end."""


class PPOConfig(AlgorithmConfig):
    """Settings of PPO, beside those of all algorithms:

    =========================  =======================================================================
    ``lambda_``                decay of the advantages
    ``clip_param``             half the width of the interval around ratio 1; a number or a schedule
    ``vf_loss_coeff``          weight of the squared error of the values
    ``vf_clip_param``          largest squared error of a value that counts; None: no limit
    ``entropy_coeff``          weight of the entropy; a number or a schedule
    ``kl_coeff``               weight of the divergence from the sampling policy at the start; 0: none
    ``kl_target``              divergence that ``kl_coeff`` is adapted to
    ``standardize_advantages`` advantages get mean 0 and standard deviation 1: True: in each minibatch, as in
                               Stable-Baselines3; ``"batch"``: in the whole batch, as in RLlib; False: they stay
    =========================  =======================================================================
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.ppo.PPO"
    training_defaults: ClassVar = {
        "lambda_": 0.95, "clip_param": 0.2, "vf_loss_coeff": 0.5, "vf_clip_param": None, "entropy_coeff": 0.0,
        "kl_coeff": 0.0, "kl_target": 0.01, "standardize_advantages": True, "estimate_advantages": True,
    }  # fmt: skip
    allowed: ClassVar = {
        **ACTOR_CRITIC, **KL, "clip_param": CLIP, "vf_clip_param": optional(number(0, above=True, endless=True)),
        "standardize_advantages": STANDARDIZED,
    }  # fmt: skip
    changed_defaults: ClassVar = {
        "lr": 1e-3, "num_epochs": 10, "minibatch_size": 256, "num_envs_per_env_runner": 8,
    }  # fmt: skip

    def learner_class(self) -> type[Learner]:
        from rlmesh.envs.learners.policy_gradient import PPOLearner

        return PPOLearner


class PPO(Algorithm):
    """Samples with all runners, then updates the policy several times with the same batch."""

    @classmethod
    def get_default_config(cls) -> Any:
        return PPOConfig(cls)
