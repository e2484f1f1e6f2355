"""SAC and TD3: algorithms for bounded continuous actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rlmesh.envs.algorithms.off_policy import OffPolicy, OffPolicyConfig
from rlmesh.envs.settings.allowed import SHARE, Allowed, number, whole

if TYPE_CHECKING:
    from rlmesh.envs.learners.learner import Learner

__all__ = ["SAC", "TD3", "SACConfig", "TD3Config"]


NOISE = number(0, 2)
"""The standard deviation of noise on actions between -1 and 1: at most the width of this interval."""


class SACConfig(OffPolicyConfig):
    """Settings of soft actor-critic (Haarnoja et al. 2018), beside those of `OffPolicyConfig`:

    ====================  =========================================================================
    ``tau``               share by which the target moves to the critics with each update
    ``initial_alpha``     temperature at the start; it is learnt
    ``target_entropy``    entropy that it follows; ``"auto"``: minus the dimensions of an action
    ====================  =========================================================================
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.continuous.SAC"
    training_defaults: ClassVar = {"tau": 0.005, "initial_alpha": 1.0, "target_entropy": "auto"}
    allowed: ClassVar = {
        "tau": SHARE, "initial_alpha": number(0, 1_000_000, above=True),
        "target_entropy": Allowed("a number or 'auto'", lambda value: value == "auto" or number().accepts(value)),
    }  # fmt: skip
    changed_defaults: ClassVar = {"lr": 1e-3, "num_steps_sampled_before_learning_starts": 500}

    def learner_class(self) -> type[Learner]:
        if self._uses_memory():
            from rlmesh.envs.learners.recurrent.continuous import RecurrentSACLearner

            return RecurrentSACLearner
        from rlmesh.envs.learners.sac import SACLearner

        return SACLearner

    def policy_config(self) -> dict[str, Any]:
        from rlmesh.envs.modules.continuous import SACModule

        config = super().policy_config()
        config["module_class"] = config["module_class"] or SACModule
        return config


class TD3Config(OffPolicyConfig):
    """Settings of TD3 (Fujimoto et al. 2018), beside those of `OffPolicyConfig`. Actions are scaled to [-1, 1].

    ======================  =====================================================================
    ``tau``                 share by which the targets move with each update of the actor
    ``policy_delay``        updates of the critics for one of the actor
    ``exploration_noise``   standard deviation of the noise on actions; 0: none
    ``target_noise``        standard deviation of the noise on the actions of targets; 0: none
    ``target_noise_clip``   largest absolute value of that noise; 0: none
    ======================  =====================================================================
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.continuous.TD3"
    training_defaults: ClassVar = {
        "tau": 0.005, "policy_delay": 2, "exploration_noise": 0.1, "target_noise": 0.2, "target_noise_clip": 0.5,
    }  # fmt: skip
    allowed: ClassVar = {
        "tau": SHARE, "policy_delay": whole(1), "exploration_noise": NOISE, "target_noise": NOISE,
        "target_noise_clip": number(0, endless=True),
    }  # fmt: skip
    changed_defaults: ClassVar = {"lr": 1e-3, "num_steps_sampled_before_learning_starts": 500}

    def learner_class(self) -> type[Learner]:
        if self._uses_memory():
            from rlmesh.envs.learners.recurrent.continuous import RecurrentTD3Learner

            return RecurrentTD3Learner
        from rlmesh.envs.learners.td3 import TD3Learner

        return TD3Learner

    def policy_config(self) -> dict[str, Any]:
        from rlmesh.envs.modules.continuous import TD3Module

        config = super().policy_config()
        config["module_class"] = config["module_class"] or TD3Module
        return config


class SAC(OffPolicy):
    """Soft actor-critic."""

    @classmethod
    def get_default_config(cls) -> Any:
        return SACConfig(cls)


class TD3(OffPolicy):
    """Twin delayed deep deterministic policy gradient."""

    @classmethod
    def get_default_config(cls) -> Any:
        return TD3Config(cls)
