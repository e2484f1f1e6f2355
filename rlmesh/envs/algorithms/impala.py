"""IMPALA and APPO: runners sample while the learner trains (Espeholt et al. 2018; Luo et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlmesh.envs.algorithms.algorithm import Algorithm
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.algorithms.pg import ACTOR_CRITIC
from rlmesh.envs.algorithms.ppo import CLIP, KL
from rlmesh.envs.algorithms.results import ResultDict
from rlmesh.envs.algorithms.train_ops import train_one_step
from rlmesh.envs.multi_agent.settings import counting_problems
from rlmesh.envs.replay.circular import CircularBuffer
from rlmesh.envs.runners.async_sampler import AsyncSampler, SampledFragments, staleness
from rlmesh.envs.settings.allowed import FLAG, SHARE, number, optional, whole

if TYPE_CHECKING:
    from rlmesh.envs.learners.learner import Learner

__all__ = ["APPO", "IMPALA", "APPOConfig", "IMPALAConfig"]


_RATIO = optional(number(0, above=True, endless=True))


class IMPALAConfig(AlgorithmConfig):
    """Settings of IMPALA, beside those of all algorithms:

    ==========================================  ======================================================================
    ``vtrace_clip_rho_threshold``               limit of the ratios in the targets of values; None for no limit
    ``vtrace_clip_pg_rho_threshold``            limit of the ratios in the advantages; None for no limit
    ``vf_loss_coeff``                           weight of half the squared error of the values
    ``entropy_coeff``                           weight of the entropy; a number or a schedule
    ``broadcast_interval``                      training steps between two broadcasts of weights to the runners
    ``max_requests_in_flight_per_env_runner``   fragments that a runner may be ahead of the learner
    ``rollout_fragment_length``                 steps of each environment in a fragment
    ``train_batch_size``                        steps of an update, at least: whole fragments are joined
    ==========================================  ======================================================================
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.impala.IMPALA"
    is_asynchronous: ClassVar = True
    training_defaults: ClassVar = {
        "vtrace": True, "vtrace_clip_rho_threshold": 1.0, "vtrace_clip_pg_rho_threshold": 1.0, "vf_loss_coeff": 0.5,
        "entropy_coeff": 0.01, "broadcast_interval": 1,
    }  # fmt: skip
    allowed: ClassVar = {
        **ACTOR_CRITIC, "vtrace_clip_rho_threshold": _RATIO, "vtrace_clip_pg_rho_threshold": _RATIO,
        "broadcast_interval": whole(1),
    }  # fmt: skip
    changed_defaults: ClassVar = {
        "lr": 5e-4, "grad_clip": 40.0, "adam_epsilon": 1e-8, "train_batch_size": 500, "num_env_runners": 2,
        "num_envs_per_env_runner": 5, "rollout_fragment_length": 50, "max_requests_in_flight_per_env_runner": 2,
        "min_env_steps_per_iteration": 5000,
    }  # fmt: skip

    def learner_class(self) -> type[Learner]:
        from rlmesh.envs.learners.impala import IMPALALearner

        return IMPALALearner

    of_all_policies: ClassVar = (*AlgorithmConfig.of_all_policies, "broadcast_interval")

    def problems(self) -> list[str]:
        values, found = self._values, [*super().problems(), *counting_problems(self._values)]
        if values["vtrace"] is not True:
            found.append("vtrace: only True; steps of older policies need the correction. PPO does without")
        if values["rollout_fragment_length"] == "auto":
            found.append("rollout_fragment_length: a whole number, since a batch is made of the fragments that arrive")
        if values["minibatch_size"] is not None:
            found.append("minibatch_size: V-trace needs whole fragments; set train_batch_size instead")
        return found


class APPOConfig(IMPALAConfig):
    """Settings of APPO, beside those of IMPALA:

    ==========================================  ======================================================================
    ``clip_param``                              half the width of the interval around ratio 1; a number or a schedule
    ``target_worker_clipping``                  limit of the ratio of the sampling policy to the target policy
    ``tau``                                     share of the distance that the target network moves by
    ``target_network_update_freq``              between two moves: so many fills of the circular buffer
    ``use_kl_loss``, ``kl_coeff``, ``kl_target``  add the divergence from the target policy, and adapt its weight
    ``use_circular_buffer``                     train on each batch several times
    ``circular_buffer_num_batches``             batches of the buffer, which is filled before the first update; the
                                                oldest one makes room
    ``circular_buffer_iterations_per_batch``    how often a batch is used, at most; there are as many updates per batch
    ==========================================  ======================================================================
    """

    algo_class: ClassVar = "rlmesh.envs.algorithms.impala.APPO"
    training_defaults: ClassVar = {
        "clip_param": 0.4, "target_worker_clipping": 2.0, "tau": 1.0, "target_network_update_freq": 2,
        "use_kl_loss": False, "kl_coeff": 1.0, "kl_target": 0.01, "use_circular_buffer": True,
        "circular_buffer_num_batches": 8, "circular_buffer_iterations_per_batch": 2,
    }  # fmt: skip
    allowed: ClassVar = {
        **KL, "clip_param": CLIP, "target_worker_clipping": number(0, above=True, endless=True), "tau": SHARE,
        "target_network_update_freq": number(0, 1_000_000, above=True),
        **dict.fromkeys(("use_kl_loss", "use_circular_buffer"), FLAG),
        **dict.fromkeys(("circular_buffer_num_batches", "circular_buffer_iterations_per_batch"), whole(1, 10_000)),
    }  # fmt: skip

    of_all_policies: ClassVar = (
        *IMPALAConfig.of_all_policies, "use_circular_buffer", "circular_buffer_num_batches",
        "circular_buffer_iterations_per_batch",
    )  # fmt: skip

    def learner_class(self) -> type[Learner]:
        from rlmesh.envs.learners.impala import APPOLearner

        return APPOLearner

    def policy_config(self) -> dict[str, Any]:
        return {**super().policy_config(), "target_period": self.target_period(), "uses": self.buffer_size()[1]}

    def target_period(self) -> float:
        """Updates between two moves of the target network."""
        number, uses = self.buffer_size()
        return float(self["target_network_update_freq"] * number * uses)

    def buffer_size(self) -> tuple[int, int]:
        """Batches of the circular buffer, and how often each is used."""
        if not self["use_circular_buffer"]:
            return 1, 1
        return self["circular_buffer_num_batches"], self["circular_buffer_iterations_per_batch"]


class IMPALA(Algorithm):
    """The learner takes fragments as they arrive, and corrects for the age of the policy that sampled them.

    ``learner_stats`` has ``staleness_mean`` and ``staleness_max``: by how many updates the learner was ahead of the
    weights that sampled its last batch. Without remote runners, sampling and learning take turns.
    """

    wants_new_obs = True
    _sampler: AsyncSampler | None = None

    @classmethod
    def get_default_config(cls) -> Any:
        return IMPALAConfig(cls)

    def setup(self, config: AlgorithmConfig) -> None:
        super().setup(config)
        self._fragment = config["rollout_fragment_length"] * self.env_runner_group.envs_of_a_runner
        self._steps_since_broadcast = 0
        if config["num_env_runners"]:
            ahead = config["max_requests_in_flight_per_env_runner"]
            self._sampler = AsyncSampler(self.env_runner_group, self._fragment, ahead)

    def training_step(self) -> ResultDict:
        """Take the fragments of one batch, learn from them, and send the weights to the runners."""
        fragments = self._sampled()
        results = self._learned(fragments.joined(), fragments.versions)
        self._broadcast()
        return results

    def _learned(self, batch: Any, versions: Sequence[int]) -> ResultDict:
        """One update with a batch that weights of these numbers sampled, and its results."""
        lag = staleness(versions, self.env_runner_group.version)
        results = train_one_step(self, batch)
        for result in results.values():
            result.setdefault("learner_stats", {}).update(lag)
        self.env_runner_group.advance()
        return results

    def _sampled(self) -> SampledFragments:
        """Fragments of at least ``train_batch_size`` steps."""
        wanted, group = self.config["train_batch_size"], self.env_runner_group
        if self._sampler is not None:
            return self._sampler.take(wanted)
        fragments = SampledFragments()
        while fragments.rows < wanted:
            fragments.batches += group.sample_all(num_steps=self._fragment)
            fragments.versions.append(group.version)
        return fragments

    def _broadcast(self) -> None:
        """Send the weights to the runners if it is time."""
        self._steps_since_broadcast += 1
        if self._steps_since_broadcast < self.config["broadcast_interval"]:
            return
        self._steps_since_broadcast = 0
        if self._sampler is not None:
            self._sampler.publish()
        else:
            self.env_runner_group.merge_connectors()  # the local runner has the weights already

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over weights by policy id, for target networks too, and send them to all runners."""
        super().set_weights(weights)
        policies = self.env_runner.policy_map
        for policy_id in weights.keys() & policies.keys():
            learner: Any = getattr(policies[policy_id], "learner", None)
            if hasattr(learner, "follow"):
                learner.follow(1.0)

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "steps_since_broadcast": self._steps_since_broadcast}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`; fragments that are under way are dropped."""
        if self._sampler is not None:
            self._sampler.drop()
        self._steps_since_broadcast = state["steps_since_broadcast"]
        super().set_state(state)

    def stop(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        super().stop()


class APPO(IMPALA):
    """IMPALA's sampling with the clipped ratio of PPO and a target network; each batch is used several times."""

    @classmethod
    def get_default_config(cls) -> Any:
        return APPOConfig(cls)

    def setup(self, config: AlgorithmConfig) -> None:
        super().setup(config)
        number, uses = config.buffer_size()
        self.circular = CircularBuffer(number, uses, seed=config["seed"])
        self._was_full = False

    def training_step(self) -> ResultDict:
        """Take the fragments of one batch, and learn as often as each batch is to be used, from random batches.

        Before the first update, the buffer is filled. Then it never gets empty: a step adds as many uses as it takes.
        """
        while True:
            fragments = self._sampled()
            self.circular.add(fragments.joined(), fragments.versions)
            self._was_full = self._was_full or len(self.circular) == self.circular.capacity
            if self._was_full:
                break
        results = ResultDict()
        for _ in range(self.circular.uses):
            results = self._learned(*self.circular.sample())
        self._broadcast()
        return results

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "circular": self.circular.state(), "version": self.env_runner_group.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        # The weights of the state have another number here, and batches are as old as they were.
        self.circular.restore(state["circular"], later=self.env_runner_group.version - state["version"])
        self._was_full = len(self.circular) > 0
