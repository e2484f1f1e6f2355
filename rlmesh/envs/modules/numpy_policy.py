"""`NumpyPolicy`: the policy of remote runners whose networks NumPy can evaluate, so that they start without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.modules.numpy_layers import NumpyLayers
from rlmesh.envs.modules.policy import Explorer, Policy
from rlmesh.envs.runners.fragments import Fragment

__all__ = ["NumpyPolicy", "numpy_arguments"]

LEARNS = ("estimate_advantages", "gamma", "lambda_")


def numpy_arguments(runner: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of remote runners that differ if a `NumpyPolicy` can act for the local runner's policy; else empty.

    That is so for the built-in `ModulePolicy` and `ActorCriticModule` themselves, with separate networks of a few
    linear layers and actions of Discrete or of Box of floats.
    """
    import sys

    found = sys.modules.get("rlmesh.envs.modules.module_policy")
    policy: Any = getattr(runner, "policy", None)
    if found is None or type(policy) is not found.ModulePolicy:
        return {}
    from rlmesh.envs.modules.rl_module import ActorCriticModule, numpy_description

    described = numpy_description(policy.module) if type(policy.module) is ActorCriticModule else None
    if described is None:
        return {}
    import cloudpickle

    config = dict(given.get("policy_config") or {})
    full = cloudpickle.dumps((type(policy), config))
    own = {name: config[name] for name in LEARNS if name in config}
    return {"policy_class": NumpyPolicy, "policy_config": {**own, "networks": described, "full": full}}


class NumpyPolicy(Policy):
    """Acts as the `ModulePolicy` whose weights it gets, with the same random numbers; values and log-probabilities
    agree to 1e-6.

    Whoever asks for its module, or lets it learn, gets the whole policy: it is made then, and acts from then on.

    Args:
        config: ``networks`` describes the layers by the names of their weights; ``full`` is the pickled class and
            configuration of the whole policy.
    """

    def __init__(self, observation_space: Any, action_space: Any, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(observation_space, action_space, config)
        self._weights: Mapping[str, np.ndarray] = {}
        self._whole: Any = None
        self.acts: NumpyLayers | None = None
        self._values: NumpyLayers | None = None
        discrete = type(action_space).__name__ == "Discrete"
        self.actions: _Discrete | _Normal = _Discrete(action_space) if discrete else _Normal(action_space)

    def get_weights(self) -> Any:
        return dict(self._weights) if self._whole is None else self._whole.get_weights()

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self._weights = {name: np.array(value) for name, value in weights.items()}
        if self._whole is not None:
            self._whole.set_weights(weights)
            return
        networks = self.config["networks"]
        self.acts, self._values = (NumpyLayers.described(networks[name], weights) for name in ("acts", "values"))

    def explorer(self, steps: int, size: int, *, explore: bool) -> Any:
        if self._whole is not None:
            return self._whole.explorer(steps, size, explore=explore)
        return NumpyExplorer(self, steps, size, explore=explore)

    def compute_actions(
        self, obs_batch: np.ndarray, state_batches: Any = None, *, explore: bool = True, **more: Any
    ) -> tuple[np.ndarray, Any, dict[str, np.ndarray]]:
        explorer = self.explorer(1, len(obs_batch), explore=explore)
        actions = explorer.act(0, np.asarray(obs_batch))
        extra = {name: column[:, 0] for name, column in explorer.columns().items() if name != columns.ACTIONS}
        return actions, state_batches, extra

    def postprocess_fragment(self, fragment: Fragment) -> None:
        """Add log-probabilities of the actions, and, if the algorithm wants them, values and advantages."""
        if self._whole is not None:
            self._whole.postprocess_fragment(fragment)
            return
        given = fragment.columns
        inputs, actions = given[columns.ACTION_DIST_INPUTS], given[columns.ACTIONS]
        given[columns.ACTION_LOGP] = self.actions.log_prob(inputs, actions)
        if not self.config.get("estimate_advantages"):
            return
        values = self._values_of(fragment.flat(columns.OBS)).reshape(fragment.size, fragment.steps)
        next_values = fragment.next_values(values, self._values_of)
        fragment.add_advantages(values, next_values, self.config["gamma"], self.config["lambda_"])

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, Any]:
        learned: dict[str, Any] = self.whole().learn_on_batch(batch)
        return learned

    def whole(self) -> Any:
        """The policy with its module, which acts from now on."""
        if self._whole is None:
            import cloudpickle

            policy_class, config = cloudpickle.loads(self.config["full"])
            self._whole = policy_class(self.observation_space, self.action_space, config)
            self._whole.set_weights(self._weights)
            self._whole.rng = self.rng
        return self._whole

    def __getattr__(self, name: str) -> Any:
        if name in ("module", "model", "learner", "values_of"):
            return getattr(self.whole(), name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _values_of(self, observations: np.ndarray) -> np.ndarray:
        assert self._values is not None
        return self._values(observations)[:, 0]


class NumpyExplorer(Explorer):
    """Acts by the layers of a `NumpyPolicy`."""

    policy: NumpyPolicy

    def __init__(self, policy: NumpyPolicy, steps: int, size: int, *, explore: bool) -> None:
        super().__init__(policy, steps, size, explore=explore)
        self._inputs = np.zeros((size, steps, policy.actions.size), np.float32)
        self._noise = policy.actions.noise(policy.rng, (steps, size)) if explore else None

    def act(self, time: int, observations: np.ndarray) -> np.ndarray:
        assert self.policy.acts is not None, "the policy has no weights yet"
        inputs = self._inputs[:, time] = self.policy.acts(observations)
        chosen = self.policy.actions.choose(inputs, None if self._noise is None else self._noise[time])
        self.actions[:, time] = chosen
        return self.policy.actions.to_env(chosen)

    def columns(self) -> dict[str, np.ndarray]:
        """All columns; ``action_dist_inputs`` are those that actions were drawn from."""
        return {**super().columns(), columns.ACTION_DIST_INPUTS: self._inputs}


class _Discrete:
    """`CategoricalActions` without torch."""

    def __init__(self, space: Any) -> None:
        self.size, self.start = int(space.n), int(space.start)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.gumbel(size=(*shape, self.size)).astype(np.float32)

    def choose(self, inputs: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        actions: np.ndarray = (inputs if noise is None else inputs + noise).argmax(-1) + self.start
        return actions

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return actions

    def log_prob(self, inputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        shifted = inputs - inputs.max(-1, keepdims=True)
        chosen = np.take_along_axis(shifted, (actions - self.start)[..., None], -1)[..., 0]
        logs: np.ndarray = chosen - np.log(np.exp(shifted).sum(-1))
        return logs


class _Normal:
    """`GaussianActions` without torch."""

    def __init__(self, space: Any) -> None:
        self.shape, self.low, self.high = tuple(space.shape), space.low, space.high
        self.dim = math.prod(self.shape)
        self.size = 2 * self.dim

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal((*shape, self.dim), np.float32)

    def choose(self, inputs: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        means = inputs[..., : self.dim]
        actions = means if noise is None else means + np.exp(inputs[..., self.dim :]) * noise
        shaped: np.ndarray = np.reshape(actions, (*inputs.shape[:-1], *self.shape))
        return shaped

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        clipped: np.ndarray = np.clip(actions, self.low, self.high)
        return clipped

    def log_prob(self, inputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        mean, log_std = inputs[..., : self.dim], inputs[..., self.dim :]
        scaled = (actions.reshape(mean.shape) - mean) * np.exp(-log_std)
        logs: np.ndarray = -(0.5 * np.square(scaled) + log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * self.dim
        return logs.astype(np.float32)
