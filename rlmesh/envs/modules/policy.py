"""`Policy`: chooses actions, learns from batches, and has weights that travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.environments.actions import ActionRows
from rlmesh.envs.environments.features import whole_numbers
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.runners.fragments import Fragment

__all__ = ["Explorer", "Policy", "States"]

States = dict[str, np.ndarray]
"""States of a recurrent policy by name, each ``[environments, …]``; empty for policies without memory."""


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
            state_batches: states of a recurrent policy, in the form of `get_initial_state`, each ``[environments, …]``;
                None for other policies.
            explore: sample actions; otherwise take the most probable ones.

        Returns:
            Actions ``[environments, …]``, states after these steps in the same form, and more columns of the batch,
            such as ``action_logp``. Actions of composed spaces are rows of `ActionRows`, or a list of actions in the
            space's own structure.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compute_actions")

    def compute_single_action(
        self, obs: Any, state: Any = None, *, explore: bool = True
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Choose an action for one observation; arguments and results as of `compute_actions`, without the first axis.

        Args:
            state: None: the initial state.
        """
        before = self.get_initial_state() if state is None else state
        given = _map_states(lambda each: np.asarray(each)[None], before) if before else None
        actions, states, extra = self.compute_actions(np.asarray(obs)[None], given, explore=explore)
        after = _map_states(lambda each: np.asarray(each)[0], states) if before else states
        return actions[0], after, {name: column[0] for name, column in extra.items()}

    def get_initial_state(self) -> Mapping[str, Any] | list[Any]:
        """The state at the start of an episode: a dict or a list of arrays without the axis of environments.

        Empty, if the policy has no memory. Runners keep the state of each environment, also from one batch to the next,
        and put it back to this one where an episode begins. Batches have it as columns ``state_in_…``: the names of the
        dict, or the places in the list.
        """
        return {}

    def is_recurrent(self) -> bool:
        """True if the policy has a state."""
        return bool(self.get_initial_state())

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
    """Acts during one fragment by `Policy.compute_actions`, and keeps actions, states and further columns.

    Attributes:
        actions: ``[environments, time, …]``, as the policy chose them.
        extra: further columns ``[environments, time, …]``.
        states: of a recurrent policy, after the last step.
    """

    def __init__(self, policy: Policy, steps: int, size: int, *, explore: bool) -> None:
        self.policy, self.steps, self.size, self.explore = policy, steps, size, explore
        self.rows = ActionRows(policy.action_space)
        self.actions = self.rows.empty(size, steps)
        self.extra: dict[str, np.ndarray] = {}
        self._bounds = bounds_of(policy.action_space)
        given = policy.get_initial_state()
        self._knows_states = False
        self._lists = not isinstance(given, Mapping)
        self._initial: States = {name: np.asarray(each) for name, each in _named(given).items()}
        self.states: States = {name: np.repeat(each[None], size, 0) for name, each in self._initial.items()}
        self._before = {name: np.zeros((size, steps, *each.shape), each.dtype) for name, each in self._initial.items()}

    def go_on(self, states: States) -> None:
        """Take over the states of the fragment before; an empty dict leaves the initial ones.

        Who lets a policy with memory act calls this method first, and `begin` where episodes begin.
        """
        self._knows_states = True
        if states:
            self.states = states

    def go_on_with(self, states: Sequence[States]) -> None:
        """Take over the state of each environment, without its axis; an empty one is the initial state."""
        self.go_on({
            name: np.stack([each.get(name, initial) for each in states]) for name, initial in self._initial.items()
        })  # fmt: skip

    def begin(self, first: np.ndarray) -> None:
        """Give environments whose next observation is the first of an episode the initial state.

        Args:
            first: ``[environments]``, bool.
        """
        for name, state in self.states.items():
            state[first] = self._initial[name]

    def state_of(self, index: int) -> States:
        """A copy of the state of one environment, without the axis of environments."""
        return {name: state[index].copy() for name, state in self.states.items()}

    def states_before(self, time: int, count: int) -> States:
        """The state of the first environment before a time step, of which ``count`` were acted in."""
        if time >= count:
            return self.state_of(0)
        return {name: before[0, time].copy() for name, before in self._before.items()}

    def act(self, time: int, observations: np.ndarray) -> np.ndarray:
        """The actions to send to the environments at a time step.

        Raises:
            UsageError: an action is not in its space, or states have another form than the initial one.
        """
        self._note_states(time)
        given: Any = (list(self.states.values()) if self._lists else dict(self.states)) if self.states else None
        actions, states, extra = self.policy.compute_actions(observations, given, explore=self.explore)
        self._take_states(_named(states if states is not None else {}))
        self._keep_actions(time, self.rows.to_rows(actions))
        for name, value in extra.items():
            value = np.asarray(value)
            if name not in self.extra:
                self.extra[name] = np.zeros((self.size, self.steps, *value.shape[1:]), value.dtype)
            self.extra[name][:, time] = value
        return self._for_env(self.actions[:, time])

    def _keep_actions(self, time: int, actions: np.ndarray) -> None:
        """Keep the actions of a time step; refuses numbers that do not fit their type, which NumPy would change."""
        dtype = self.actions.dtype
        found = actions if actions.dtype == dtype else whole_numbers(actions, dtype)
        if found is None:
            raise UsageError(
                f"{type(self.policy).__name__} chose actions of {actions.dtype} that do not fit {dtype}, the type of "
                f"{self.policy.action_space}"
            )
        self.actions[:, time] = found

    def _for_env(self, actions: np.ndarray) -> np.ndarray:
        """Actions of a Box clipped to its bounds; numbers of choices are checked."""
        if self._bounds is None:
            return actions
        space = self.policy.action_space
        clipped: np.ndarray = np.clip(actions, *self._bounds)
        if type(space).__name__ == "Box":
            return clipped
        if (wrong := (clipped != actions).reshape(len(actions), -1).any(1)).any():
            name = type(self.policy).__name__
            raise UsageError(f"{name} chose the action {actions[wrong][0]}, which is not in {space}")
        return actions

    def _note_states(self, time: int) -> None:
        if self.states and not self._knows_states:
            raise UsageError(
                f"{type(self.policy).__name__} has memory, and this kind of runner does not keep its state between "
                "steps; EnvRunner does"
            )
        for name, state in self.states.items():
            self._before[name][:, time] = state

    def _take_states(self, found: States) -> None:
        """Keep copies of new states, after a check of their form."""
        name = type(self.policy).__name__
        if found.keys() != self._initial.keys():
            raise UsageError(
                f"{name} returned the states {sorted(found)}, and its get_initial_state has {sorted(self._initial)}; "
                "runners keep states of policies whose get_initial_state returns them"
            )
        states = {}
        for key, initial in self._initial.items():
            states[key] = np.array(found[key], initial.dtype)
            if states[key].shape != (self.size, *initial.shape):
                raise UsageError(
                    f"{name} returned a state {key!r} of shape {states[key].shape}; it must be "
                    f"{(self.size, *initial.shape)}: that of get_initial_state for each environment"
                )
        self.states = states

    def columns(self) -> dict[str, np.ndarray]:
        """All columns that this object has collected."""
        states = {f"{columns.STATE_IN}_{name}": each for name, each in self._before.items()}
        return {columns.ACTIONS: self.actions, **states, **self.extra}


def bounds_of(space: Any) -> tuple[Any, Any] | None:
    """The least and the largest action of a space, or arrays of them; None for spaces that have none."""
    kind = type(space).__name__
    if kind == "Box":
        return space.low, space.high
    if kind == "Discrete":
        return space.start, space.start + space.n - 1
    if kind == "MultiDiscrete":
        return space.start, space.start + space.nvec - 1
    return (0, 1) if kind == "MultiBinary" else None


def _map_states(fn: Callable[[Any], Any], states: Any) -> Any:
    return {k: fn(each) for k, each in states.items()} if isinstance(states, Mapping) else [fn(each) for each in states]


def _named(states: Any) -> dict[str, Any]:
    return dict(states) if isinstance(states, Mapping) else {str(i): each for i, each in enumerate(states)}
