"""`Policy`: chooses actions, learns from batches, and has weights that travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.environments.actions import ActionRows

if TYPE_CHECKING:
    from rlmesh.envs.runners.fragments import Fragment

__all__ = ["Explorer", "Policy"]


class Policy:
    """Base of policies: a subclass defines `compute_actions`, and, to learn, `learn_on_batch` and the weights.

    A policy needs no torch. The policies of the built-in algorithms are `ModulePolicy`.

    Args:
        observation_space, action_space: Gymnasium's spaces of one environment.
        config: settings; the policy's own business.
    """

    def __init__(self, observation_space: Any, action_space: Any, config: Mapping[str, Any] | None = None) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.config: dict[str, Any] = dict(config or {})
        self.rng = np.random.default_rng(self.config.get("seed"))

    def compute_actions(
        self, obs_batch: np.ndarray, state_batches: Any = None, *, explore: bool = True, **more: Any
    ) -> tuple[np.ndarray, Any, dict[str, np.ndarray]]:
        """Choose an action for each observation.

        Args:
            obs_batch: ``[environments, …]``.
            state_batches: states of a recurrent policy.
            explore: sample actions; otherwise take the most probable ones.

        Returns:
            Actions ``[environments, …]``, new states, and more columns of the batch, such as ``action_logp``. Actions
            of composed spaces are rows of `ActionRows`, or a list of actions in the space's own structure.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compute_actions")

    def compute_single_action(
        self, obs: Any, state: Any = None, *, explore: bool = True
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Choose an action for one observation; results as of `compute_actions`, without the first axis."""
        actions, states, extra = self.compute_actions(np.asarray(obs)[None], state, explore=explore)
        return actions[0], states, {name: column[0] for name, column in extra.items()}

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, Any]:
        """Improve the policy with a batch; returns metrics, under ``learner_stats``."""
        raise NotImplementedError(f"{type(self).__name__} has no learn_on_batch")

    def get_weights(self) -> Any:
        """The weights: a dict of arrays, or another value that can be pickled."""
        return {}

    def set_weights(self, weights: Any) -> None:
        """Take over the weights that `get_weights` of a policy of the same class gave."""

    def get_state(self) -> dict[str, Any]:
        """Everything that a restored policy needs."""
        return {"weights": self.get_weights(), "rng": self.rng.bit_generator.state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `get_state`."""
        self.set_weights(state["weights"])
        self.rng.bit_generator.state = state["rng"]

    def explorer(self, steps: int, size: int, *, explore: bool) -> Explorer:
        """The object that acts during one fragment of ``steps`` steps of ``size`` environments."""
        return Explorer(self, steps, size, explore=explore)

    def postprocess_fragment(self, fragment: Fragment) -> None:
        """Add columns to a fragment that a runner has sampled, such as advantages."""


class Explorer:
    """Acts during one fragment by `Policy.compute_actions`, and keeps actions and further columns.

    Attributes:
        actions: ``[environments, time, …]``, as the policy chose them.
        extra: further columns ``[environments, time, …]``.
    """

    def __init__(self, policy: Policy, steps: int, size: int, *, explore: bool) -> None:
        self.policy, self.steps, self.size, self.explore = policy, steps, size, explore
        self.rows = ActionRows(policy.action_space)
        self.actions = self.rows.empty(size, steps)
        self.extra: dict[str, np.ndarray] = {}
        self.states: Any = None

    def act(self, time: int, observations: np.ndarray) -> np.ndarray:
        """The actions to send to the environments at a time step."""
        actions, self.states, extra = self.policy.compute_actions(observations, self.states, explore=self.explore)
        self.actions[:, time] = self.rows.to_rows(actions)
        for name, value in extra.items():
            value = np.asarray(value)
            if name not in self.extra:
                self.extra[name] = np.zeros((self.size, self.steps, *value.shape[1:]), value.dtype)
            self.extra[name][:, time] = value
        return self.actions[:, time]

    def columns(self) -> dict[str, np.ndarray]:
        """All columns that this object has collected."""
        return {columns.ACTIONS: self.actions, **self.extra}
