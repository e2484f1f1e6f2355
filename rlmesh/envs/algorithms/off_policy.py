"""The base of algorithms that learn from a replay buffer: DQN, SAC, TD3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlmesh.envs.algorithms.algorithm import Algorithm
from rlmesh.envs.algorithms.algorithm_config import AlgorithmConfig
from rlmesh.envs.algorithms.results import ResultDict
from rlmesh.envs.algorithms.settings import MOST_ROWS
from rlmesh.envs.batches import columns
from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.learners.sequences import state_columns
from rlmesh.envs.modules.module_policy import ModulePolicy
from rlmesh.envs.multi_agent.runner import MultiAgentEnvRunner
from rlmesh.envs.multi_agent.settings import counting_problems
from rlmesh.envs.replay import (
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedSequenceReplayBuffer,
    ReplayBuffer,
    SequenceReplayBuffer,
)
from rlmesh.envs.runners.base import DEFAULT_POLICY
from rlmesh.envs.settings.allowed import Allowed, faults_of, number, optional, whole
from rlmesh.envs.settings.model import OFF_POLICY_KEYS
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.modules.policy import Policy

__all__ = ["OffPolicy", "OffPolicyConfig"]

BUFFERS: dict[str, type[ReplayBuffer]] = {
    "ReplayBuffer": ReplayBuffer, "PrioritizedReplayBuffer": PrioritizedReplayBuffer,
    "SequenceReplayBuffer": SequenceReplayBuffer, "PrioritizedSequenceReplayBuffer": PrioritizedSequenceReplayBuffer,
}  # fmt: skip
BUFFER_KEYS = {"type": "ReplayBuffer", "capacity": 100_000, "alpha": 0.6, "beta": 0.4, "eps": 1e-6, "eta": 0.9,
               "replay_burn_in": 0}  # fmt: skip
BUFFER_ALLOWED: dict[str, Allowed] = {
    "capacity": whole(1, MOST_ROWS), "alpha": number(0, 1), "beta": number(0, 1), "eps": number(0, 1, above=True),
    "eta": number(0, 1), "replay_burn_in": whole(0, 1_000_000),
}  # fmt: skip
SEQUENCES, PRIORITIZED_SEQUENCES = "SequenceReplayBuffer", "PrioritizedSequenceReplayBuffer"
OF_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("alpha", "beta", "eps"), ("PrioritizedReplayBuffer", PRIORITIZED_SEQUENCES)),
    "eta": (PRIORITIZED_SEQUENCES,), "replay_burn_in": (SEQUENCES, PRIORITIZED_SEQUENCES),
}  # fmt: skip
"""Keys that belong to some types of buffers."""
UNUSED = ("num_epochs", "minibatch_size")
"""Settings of batches that are used several times."""


class OffPolicyConfig(AlgorithmConfig):
    """Settings of algorithms that learn from a replay buffer, beside those of all algorithms:

    ============================================  ====================================================================
    ``replay_buffer_config``                      ``type`` (``"ReplayBuffer"`` or ``"PrioritizedReplayBuffer"``; without
                                                  it, that of the algorithm's defaults),
                                                  ``capacity`` in steps; with priorities ``alpha``, ``beta``, ``eps``;
                                                  with ``use_lstm`` or ``use_attention`` ``"SequenceReplayBuffer"`` or
                                                  ``"PrioritizedSequenceReplayBuffer"``, with ``replay_burn_in``, the
                                                  steps before the ``max_seq_len`` ones, and ``eta``, the share of the
                                                  largest error in the priority of a sequence
    ``n_step``                                    steps of a transition
    ``num_steps_sampled_before_learning_starts``  steps of environments before the first update
    ``training_intensity``                        replayed rows per sampled step; None: one update per training step
    ``train_batch_size``                          rows of an update; with memory, rounded up to whole sequences
    ``rollout_fragment_length``                   steps of each environment per training step
    ============================================  ====================================================================
    """

    training_defaults: ClassVar = {
        "replay_buffer_config": {"type": "ReplayBuffer", "capacity": 100_000}, "n_step": 1,
        "num_steps_sampled_before_learning_starts": 1000, "training_intensity": None,
    }  # fmt: skip
    allowed: ClassVar = {
        "n_step": whole(1, 10_000), "num_steps_sampled_before_learning_starts": whole(0),
        "training_intensity": optional(number(0, 1_000_000, above=True)),
    }  # fmt: skip
    changed_defaults: ClassVar = {
        "rollout_fragment_length": 1, "train_batch_size": 256, "min_env_steps_per_iteration": 1000, "grad_clip": None,
        "adam_epsilon": 1e-8,
    }  # fmt: skip

    model_keys: ClassVar = OFF_POLICY_KEYS
    of_all_policies: ClassVar = (
        *AlgorithmConfig.of_all_policies, "replay_buffer_config", "n_step", "gamma", "training_intensity",
        "num_steps_sampled_before_learning_starts",
    )  # fmt: skip

    def policy_class(self) -> type[Policy]:
        from rlmesh.envs.modules.exploration import OffPolicyModulePolicy

        return OffPolicyModulePolicy

    def problems(self) -> list[str]:
        values, found = self._values, super().problems()
        config = values["replay_buffer_config"]
        found += counting_problems(values) + buffer_problems(config, self._buffer_type()) + self._sequence_problems()
        found += self._size_problems()
        if values["rollout_fragment_length"] == "auto":
            found.append("rollout_fragment_length: a whole number, since the batch is not sampled but replayed")
        found += [f"{name}: each replayed batch is used once; leave it out" for name in UNUSED if self._changed(name)]
        return found

    def _sequence_problems(self) -> list[str]:
        if self._uses_memory() == self._replays_sequences():
            return []
        return [
            f"use_lstm or use_attention, and replay_buffer_config={{'type': {SEQUENCES!r}}} or "
            f"{PRIORITIZED_SEQUENCES!r}, belong together: a module with memory learns from sequences; set both or none"
        ]

    def _size_problems(self) -> list[str]:
        """The faults of a buffer that is too small for what is drawn from it."""
        config = self._values["replay_buffer_config"]
        capacity = {**BUFFER_KEYS, **(config if isinstance(config, Mapping) else {})}["capacity"]
        return [
            f"replay_buffer_config: capacity={capacity} is smaller than {name}={size}; the nearest is {size}"
            for name in ("train_batch_size", "n_step")
            if type(size := self._values[name]) is int and type(capacity) is int and 1 <= capacity < size
        ]

    def _buffer_type(self) -> str:
        """The type of a buffer whose settings name none: that of the algorithm's defaults."""
        for base in type(self).__mro__:
            for name in ("changed_defaults", "training_defaults"):
                config = vars(base).get(name, {}).get("replay_buffer_config", {})
                if "type" in config:
                    return str(config["type"])
        return "ReplayBuffer"

    def buffer_config(self) -> dict[str, Any]:
        """The settings of the replay buffer, with the defaults of those that were not given."""
        return {**BUFFER_KEYS, "type": self._buffer_type(), **self._values["replay_buffer_config"]}

    def _uses_memory(self) -> bool:
        models = [each for each in (self._values["model"], self._values["model_config"]) if isinstance(each, Mapping)]
        model = {name: value for each in models for name, value in each.items()}
        return bool(model.get("use_lstm") or model.get("use_attention"))

    def _replays_sequences(self) -> bool:
        config = self._values["replay_buffer_config"]
        return isinstance(config, Mapping) and config.get("type") in (SEQUENCES, PRIORITIZED_SEQUENCES)

    def _changed(self, name: str) -> bool:
        return bool(self._values[name] != type(self)()._values[name])


def buffer_problems(config: Any, default_type: str) -> list[str]:
    """The faults of a ``replay_buffer_config``.

    Args:
        default_type: the type of a buffer whose settings name none.
    """
    if not isinstance(config, Mapping):
        return [f"replay_buffer_config: a dict, not {config!r}"]
    found = [
        f"replay_buffer_config: there is no key {key!r}.{did_you_mean(str(key), BUFFER_KEYS)}"
        for key in config
        if key not in BUFFER_KEYS
    ]
    kind = config.get("type", default_type)
    if kind not in BUFFERS:
        return [*found, f"replay_buffer_config: there is no type {kind!r}.{did_you_mean(str(kind), BUFFERS)}"]
    found += [
        f"replay_buffer_config: {key} belongs to the type {' or '.join(map(repr, types))}"
        for key, types in OF_TYPES.items()
        if key in config and kind not in types
    ]
    found += faults_of(config, BUFFER_ALLOWED, prefix="replay_buffer_config: ", defaults=BUFFER_KEYS)
    return found


class OffPolicy(Algorithm):
    """Samples a few steps, adds them to a replay buffer, and updates the policy with replayed transitions.

    With several policies, each has a buffer and updates of its own.

    Attributes:
        replay: the buffer, or, of several agents, a `MultiAgentReplayBuffer`; a part of the checkpoint.
        env_steps_sampled: steps that were added to it.
    """

    wants_new_obs = True

    def setup(self, config: AlgorithmConfig) -> None:
        super().setup(config)
        assert isinstance(config, OffPolicyConfig)
        given = config.buffer_config()
        kind = BUFFERS[given["type"]]
        several = isinstance(self.env_runner, MultiAgentEnvRunner)
        for name in self.env_runner.policy_map if not callable(config["policies_to_train"]) else ():
            if self.learner_group.trains(name):
                self._require_learner(name)
        self._stored = {name: self._columns_of(name) for name in self.learners}
        options: dict[str, Any] = {}
        by_policy = {name: {"n_step": config["n_step"], "gamma": config["gamma"]} for name in self.learners}
        self._drawn = dict.fromkeys(self.learners, config["train_batch_size"])
        if kind in (PrioritizedReplayBuffer, PrioritizedSequenceReplayBuffer):
            options = {key: given[key] for key in ("alpha", "beta", "eps")}
        if kind is PrioritizedSequenceReplayBuffer:
            options["eta"] = given["eta"]
        if issubclass(kind, SequenceReplayBuffer):
            for name, learner in self.learners.items():
                length = learner.module.model_config["max_seq_len"]
                states = tuple(state_columns(learner.states))
                by_policy[name] = {"length": length, "burn_in": given["replay_burn_in"], "state_columns": states}
                self._drawn[name] = -(-config["train_batch_size"] // length)  # sequences
        options |= {"capacity": given["capacity"], "seed": config["seed"]}
        self.replay: Any = (
            MultiAgentReplayBuffer(kind, by_policy=by_policy, **options)
            if several
            else kind(**by_policy[DEFAULT_POLICY], **options)
        )
        self.env_steps_sampled = 0
        self._due = 0.0
        runners = max(1, config["num_env_runners"])
        self._steps = config["rollout_fragment_length"] * self.env_runner_group.envs_of_a_runner * runners
        self._prepare_exploration()
        self.env_runner_group.sync_weights()  # the runners got their weights before exploration was set

    def _columns_of(self, name: str) -> tuple[str, ...]:
        """The columns that the buffer of a policy has."""
        states = state_columns(self.learners[name].states)
        edges = (columns.TRUNCATEDS, columns.EPS_ID, columns.T) if self.config["n_step"] > 1 or states else ()
        needed = (columns.OBS, columns.NEW_OBS, columns.ACTIONS, columns.REWARDS, columns.TERMINATEDS)
        return (*needed, *edges, *states)

    @property
    def learners(self) -> dict[str, Any]:
        """The learners of the policies that have one, by policy."""
        policies = self.env_runner.policy_map
        return {name: each.learner for name, each in policies.items() if isinstance(each, ModulePolicy)}

    @property
    def learner(self) -> Any:
        """The learner of the only policy."""
        return self.get_policy().learner  # type: ignore[attr-defined]

    def _prepare_exploration(self) -> None:
        for learner in self.learners.values():
            learner.prepare_exploration(self.env_steps_sampled)

    def training_step(self) -> ResultDict:
        """Sample, add to the buffers, update, and send the weights to the runners."""
        batches = self.env_runner_group.sample_all(num_steps=self._steps)
        for batch in batches:
            for name, part in batch.as_multi_agent().policy_batches.items():
                if self.learner_group.trains(name, batch):
                    self._require_learner(name)
                    self.signal.add(name, part)
                    rows = {column: part[column] for column in self._stored[name]}
                    self.replay.add({name: rows} if isinstance(self.replay, MultiAgentReplayBuffer) else rows)
            self.env_steps_sampled += batch.env_steps()
        self._due += self._updates_after(sum(batch.env_steps() for batch in batches))
        starts = self.config["num_steps_sampled_before_learning_starts"]
        updates = 0
        trained = [name for name in self._filled if any(self.learner_group.trains(name, each) for each in batches)]
        results: dict[str, Any] = {name: {"learner_stats": {}, "num_agent_steps_trained": 0} for name in trained}
        if self.env_steps_sampled >= max(starts, 1):
            updates, self._due = int(self._due), self._due % 1.0
            for name in trained:
                results[name]["learner_stats"] = self._updated(name, updates)
                results[name]["num_agent_steps_trained"] = updates * self.config["train_batch_size"]
        else:
            self._due = 0.0
        self._prepare_exploration()
        self.env_runner_group.sync_weights()
        agent_steps = sum(each["num_agent_steps_trained"] for each in results.values())
        self.count_trained(updates * self.config["train_batch_size"], agent_steps)
        return ResultDict(results)

    def _require_learner(self, name: str) -> None:
        """Raise `UsageError` if a policy that shall learn has no learner of this algorithm."""
        if name not in self.learners:
            kind, own = type(self.env_runner.policy_map[name]).__name__, type(self).__name__
            raise UsageError(
                f"{own} trains policies with modules, by replayed steps, and the policy {name!r} is a {kind}: leave it "
                "out of multi_agent(policies_to_train=[…])"
            )

    @property
    def _filled(self) -> list[str]:
        """The policies that have a buffer."""
        return list(self.replay.buffers) if isinstance(self.replay, MultiAgentReplayBuffer) else [DEFAULT_POLICY]

    def _updates_after(self, steps: int) -> float:
        """The updates of a training step that sampled so many steps; rows that were no steps change nothing."""
        intensity = self.config["training_intensity"]
        return 1.0 if intensity is None else float(steps * intensity / self.config["train_batch_size"])

    def _updated(self, name: str, updates: int) -> dict[str, Any]:
        stats: dict[str, Any] = {}
        several = isinstance(self.replay, MultiAgentReplayBuffer)
        learner, buffer = self.learners[name], self.replay.buffers[name] if several else self.replay
        learner.sampled = self.env_steps_sampled
        for _ in range(updates):
            batch = buffer.sample(self._drawn[name])
            stats = learner.update(batch)
            if isinstance(buffer, PrioritizedReplayBuffer):
                buffer.update_priorities(batch["batch_indexes"], np.abs(learner.td_errors))
            elif isinstance(buffer, PrioritizedSequenceReplayBuffer):
                buffer.update_from_errors(batch, learner.td_errors)
        return stats

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over weights by policy id, for the target networks too, and send them to all runners."""
        super().set_weights(weights)
        for name in weights.keys() & self.learners.keys():
            self.learners[name].follow(1.0)

    def get_state(self) -> dict[str, Any]:
        own = {"replay": self.replay.state(), "env_steps_sampled": self.env_steps_sampled, "due": self._due}
        return {**super().get_state(), "off_policy": own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        own = state["off_policy"]
        self.replay.restore(own["replay"])
        self.env_steps_sampled, self._due = own["env_steps_sampled"], own["due"]
        super().set_state(state)
