"""VPG, A2C: policy gradients with one update per batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rlmesh.envs.algorithms.algorithm import Algorithm
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.settings.allowed import FLAG, WEIGHT, Allowed, schedule

if TYPE_CHECKING:
    from rlmesh.envs.learners.learner import Learner

__all__ = ["A2C", "PG", "VPG", "A2CConfig", "PGConfig", "VPGConfig"]


ACTOR_CRITIC: dict[str, Allowed] = {
    "vf_loss_coeff": WEIGHT, "entropy_coeff": schedule(WEIGHT), "standardize_advantages": FLAG,
}  # fmt: skip
"""The values of settings that algorithms with a policy and a value function share."""


class PGConfig(AlgorithmConfig):
    """Settings of the vanilla policy gradient, beside those of all algorithms:

    =========================  ==============================================================
    ``lambda_``                decay of the advantages; 1: returns minus the baseline
    ``vf_loss_coeff``          weight of the squared error of the values, which are the baseline
    ``entropy_coeff``          weight of the entropy; a number or a schedule
    ``standardize_advantages`` advantages of each update get mean 0 and standard deviation 1
    =========================  ==============================================================
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.pg.PG"
    training_defaults: ClassVar = {
        "lambda_": 1.0, "vf_loss_coeff": 0.5, "entropy_coeff": 0.0, "standardize_advantages": True,
        "estimate_advantages": True,
    }  # fmt: skip
    allowed: ClassVar = ACTOR_CRITIC
    changed_defaults: ClassVar = {"lr": 4e-3, "train_batch_size": 1000, "num_envs_per_env_runner": 8}

    def learner_class(self) -> type[Learner]:
        from rlmesh.envs.learners.policy_gradient import ActorCriticLearner

        return ActorCriticLearner


class A2CConfig(PGConfig):
    """Settings of advantage actor-critic (Mnih et al. 2016, synchronous): small batches, no standardising."""

    algo_class: ClassVar = "rlmesh.envs.algorithms.pg.A2C"
    changed_defaults: ClassVar = {
        "lr": 1e-3, "train_batch_size": 128, "num_envs_per_env_runner": 16, "standardize_advantages": False,
        "min_env_steps_per_iteration": 2000,
    }  # fmt: skip


class PG(Algorithm):
    """The vanilla policy gradient: one update per batch, by ``Algorithm.training_step``."""

    @classmethod
    def get_default_config(cls) -> Any:
        return PGConfig(cls)


class A2C(Algorithm):
    """Advantage actor-critic: many small batches, one update each."""

    @classmethod
    def get_default_config(cls) -> Any:
        return A2CConfig(cls)


VPG, VPGConfig = PG, PGConfig
