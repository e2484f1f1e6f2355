"""`ModulePolicy`: the policy of an `RLModule`, for runners and learners."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.modules.numpy_forward import NumpyForward
from rlmesh.envs.modules.policy import Explorer, Policy, States
from rlmesh.envs.modules.rl_module import ActorCriticModule, RLModule, require_one_per_row

if TYPE_CHECKING:
    from rlmesh.envs.learners.learner import Learner
    from rlmesh.envs.runners.fragments import Fragment

__all__ = ["ModuleExplorer", "ModulePolicy"]

VALUE_ROWS = 4096
"""Observations of which values are computed at once; bounds the memory of convolutions."""


class ModulePolicy(Policy):
    """A policy whose networks are an `RLModule`.

    Args:
        config: ``module_class`` and ``model_config`` build the module; ``learner_class`` and its settings say how
            `learn_on_batch` learns; ``estimate_advantages``, ``gamma`` and ``lambda_`` what is added to fragments;
            ``seed`` seeds weights and actions.
    """

    def __init__(self, observation_space: Any, action_space: Any, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(observation_space, action_space, config)
        seed = self.config.get("model_seed", self.config.get("seed"))
        with torch.random.fork_rng(devices=[]):
            # The program's generator stays as it is, so policies without a seed would all draw the same weights of it.
            fresh = int(np.random.default_rng().integers(2**63))
            torch.default_generator.manual_seed(fresh if seed is None else seed)
            module_class: type[RLModule] = self.config.get("module_class") or ActorCriticModule
            self.module = module_class(observation_space, action_space, self.config.get("model_config"))
        self.module.eval()  # learners switch to training for the time of an update
        if (learner_class := self.config.get("learner_class")) is not None:
            learner_class.require_fit(self.module)
        self._learner: Learner | None = None

    @property
    def model(self) -> RLModule:
        """The module, under the name of RLlib's older API."""
        return self.module

    def get_initial_state(self) -> States:
        return {name: state.detach().numpy() for name, state in self.module.get_initial_state().items()}

    @property
    def learner(self) -> Learner:
        """The learner that updates this policy's module; made when it is first needed."""
        if self._learner is None:
            from rlmesh.envs.learners.learner import Learner

            learner_class: type[Learner] = self.config.get("learner_class") or Learner
            self._learner = learner_class(self.module, self.config)
        return self._learner

    def compute_actions(
        self, obs_batch: np.ndarray, state_batches: Any = None, *, explore: bool = True, **more: Any
    ) -> tuple[np.ndarray, Any, dict[str, np.ndarray]]:
        explorer = self.explorer(1, len(obs_batch), explore=explore)
        explorer.go_on(dict(state_batches or {}))
        actions = explorer.act(0, np.asarray(obs_batch))
        extra = {name: column[:, 0] for name, column in explorer.columns().items() if name != columns.ACTIONS}
        return actions, explorer.states or state_batches, extra

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, Any]:
        """Update the module with one batch; see the learner's ``update``."""
        return {"learner_stats": self.learner.update(batch), "num_agent_steps_trained": len(batch)}

    def get_weights(self) -> dict[str, np.ndarray]:
        """Parameters and buffers as arrays, in memory of their own."""
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self.module.state_dict().items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        self.module.load_state_dict(tensors)

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        return {**state, "learner": self._learner.get_state() if self._learner is not None else None}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        if state.get("learner") is not None:
            self.learner.set_state(state["learner"])
        else:  # the state of a policy that had not learnt: a new learner is made when it is needed
            self._learner = None

    def explorer(self, steps: int, size: int, *, explore: bool) -> ModuleExplorer:
        return ModuleExplorer(self, steps, size, explore=explore)

    @torch.inference_mode()
    def values_of(self, observations: np.ndarray, states: States | None = None) -> np.ndarray:
        """Values of observations, ``[rows]``, float32.

        Args:
            observations: ``[rows, …]``.
            states: of a recurrent module, before these observations, each ``[rows, …]``.
        """
        each = []
        for start in range(0, len(observations), VALUE_ROWS):
            rows = slice(start, start + VALUE_ROWS)
            batch = one_step(observations[rows], {name: state[rows] for name, state in (states or {}).items()})
            values = self.module.compute_values(batch).detach().float().numpy()
            each.append(values[:, 0] if states else values)
            require_one_per_row(self.module, {columns.VF_PREDS: each[-1]})
        return np.concatenate(each) if each else np.zeros(0, np.float32)

    @torch.inference_mode()
    def postprocess_fragment(self, fragment: Fragment) -> None:
        """Add log-probabilities of the actions, and, if the algorithm wants them, values and advantages."""
        given = fragment.columns
        require_one_per_row(self.module, given, axes=2)
        if columns.ACTION_LOGP not in given and columns.ACTION_DIST_INPUTS in given and self.module.distribution:
            inputs, actions = (torch.from_numpy(given[n]) for n in (columns.ACTION_DIST_INPUTS, columns.ACTIONS))
            given[columns.ACTION_LOGP] = self.module.distribution.log_prob(inputs, actions).numpy()
        if not self.config.get("estimate_advantages"):
            return
        values = given.get(columns.VF_PREDS)
        if values is None:
            before = {name: fragment.flat(f"{columns.STATE_IN}_{name}") for name in fragment.states}
            values = self._values_at(fragment.flat(columns.OBS), before).reshape(fragment.size, fragment.steps)
        next_values = fragment.next_values(values, partial(self._values_at, states=fragment.last_states()))
        fragment.add_advantages(values, next_values, self.config["gamma"], self.config["lambda_"])

    def _values_at(self, observations: np.ndarray, states: States) -> np.ndarray:
        return self.values_of(observations, states) if states else self.values_of(observations)


def one_step(observations: np.ndarray, states: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A batch of a forward pass: rows, or, with states, sequences of one step each."""
    obs = torch.from_numpy(observations)
    if not states:
        return {columns.OBS: obs}
    return {columns.OBS: obs.unsqueeze(1), columns.STATE_IN: {k: torch.from_numpy(v) for k, v in states.items()}}


class ModuleExplorer(Explorer):
    """Acts by the module: in NumPy if the module is a small stack of linear layers, else in torch."""

    policy: ModulePolicy

    def __init__(self, policy: ModulePolicy, steps: int, size: int, *, explore: bool) -> None:
        super().__init__(policy, steps, size, explore=explore)
        module = policy.module
        self._module, self._distribution = module, module.distribution
        self._forward = module.forward_exploration if explore else module.forward_inference
        # Made anew for each fragment: weights change between fragments only.
        self._fast = NumpyForward.of(module.layers_to_act(explore=explore))
        if self._distribution is not None:
            self._inputs = np.zeros((size, steps, self._distribution.size), np.float32)
            self._drew = False
            self._noise = self._distribution.noise(policy.rng, (steps, size)) if explore else None

    def act(self, time: int, observations: np.ndarray) -> np.ndarray:
        if self._fast is not None:
            inputs, outputs = self._fast(observations), {}
        else:
            self._note_states(time)
            with torch.inference_mode():
                outputs = dict(self._forward(one_step(observations, self.states)))
                if self.states:
                    states: Any = outputs.pop(columns.STATE_OUT, {})
                    self._take_states({name: state.numpy() for name, state in states.items()})
                    outputs = {name: value[:, 0] for name, value in outputs.items()}
            if columns.ACTIONS in outputs:
                actions = outputs.pop(columns.ACTIONS).detach().numpy()
                self._keep(time, outputs)
                self._keep_actions(time, actions)
                return self._for_env(self.actions[:, time])
            inputs = outputs.pop(columns.ACTION_DIST_INPUTS).detach().numpy()
        assert self._distribution is not None, "a module without a distribution returns actions"
        self._inputs[:, time], self._drew = inputs, True
        noise = self._noise
        actions = self._distribution.mode(inputs) if noise is None else self._distribution.sample(inputs, noise[time])
        self.actions[:, time] = actions
        if outputs:
            self._keep(time, outputs)
        return self._distribution.to_env(actions)

    def _keep(self, time: int, outputs: Mapping[str, torch.Tensor]) -> None:
        for name, value in outputs.items():
            array = value.detach().numpy()
            if name not in self.extra:
                self.extra[name] = np.zeros((self.size, self.steps, *array.shape[1:]), array.dtype)
            self.extra[name][:, time] = array

    def columns(self) -> dict[str, np.ndarray]:
        """All columns; ``action_dist_inputs`` are those that actions were drawn from, or what the module returned."""
        if self._distribution is None or not self._drew:
            return super().columns()
        return {**super().columns(), columns.ACTION_DIST_INPUTS: self._inputs}
