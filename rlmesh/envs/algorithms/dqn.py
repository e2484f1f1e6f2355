"""DQN: deep Q-learning (Mnih et al. 2015), double, dueling, of n steps, prioritised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rlmesh.envs.algorithms.off_policy import OffPolicy, OffPolicyConfig
from rlmesh.envs.settings.allowed import FLAG, SHARE, number, schedule, whole
from rlmesh.envs.settings.model import OFF_POLICY_KEYS

if TYPE_CHECKING:
    from rlmesh.envs.learners.learner import Learner

__all__ = ["DQN", "DQNConfig"]


class DQNConfig(OffPolicyConfig):
    """Settings of DQN, beside those of `OffPolicyConfig`:

    ==============================  ===============================================================================
    ``double_q``                    the online network chooses the action of the target
    ``dueling``                     value and advantages apart
    ``epsilon``                     share of random actions: a number, or a schedule over sampled steps
    ``target_network_update_freq``  updates of the network between two of its target
    ``tau``                         share by which the target then moves to the network; 1 copies it
    ==============================  ===============================================================================

    With ``use_lstm`` or ``use_attention`` in the ``model_config``, and ``"SequenceReplayBuffer"`` as the type of the
    buffer, DQN learns from sequences of ``max_seq_len`` steps; see `rlmesh.envs.learners.recurrent.dqn`.
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.dqn.DQN"
    training_defaults: ClassVar = {
        "double_q": True, "dueling": True, "epsilon": [[0, 1.0], [8_000, 0.04]], "target_network_update_freq": 128,
        "tau": 1.0,
    }  # fmt: skip
    allowed: ClassVar = {
        "double_q": FLAG, "dueling": FLAG, "epsilon": schedule(number(0, 1)), "target_network_update_freq": whole(1),
        "tau": SHARE,
    }  # fmt: skip
    model_keys: ClassVar = OFF_POLICY_KEYS | {"dueling"}
    changed_defaults: ClassVar = {
        "lr": 2.3e-3, "train_batch_size": 64, "rollout_fragment_length": 256, "training_intensity": 32.0, "n_step": 3,
        "replay_buffer_config": {"type": "PrioritizedReplayBuffer", "capacity": 100_000}, "grad_clip": 10.0,
    }  # fmt: skip

    def learner_class(self) -> type[Learner]:
        if self._uses_memory():
            from rlmesh.envs.learners.recurrent.dqn import RecurrentDQNLearner

            return RecurrentDQNLearner
        from rlmesh.envs.learners.dqn import DQNLearner

        return DQNLearner

    def policy_config(self) -> dict[str, Any]:
        from rlmesh.envs.modules.q_module import QModule

        config = super().policy_config()
        config["module_class"] = config["module_class"] or QModule
        config["model_config"] = {"dueling": self._values["dueling"], **config["model_config"]}
        return config


class DQN(OffPolicy):
    """Deep Q-learning."""

    @classmethod
    def get_default_config(cls) -> Any:
        return DQNConfig(cls)
