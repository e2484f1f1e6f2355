"""Exploration of off-policy algorithms: epsilon-greedy, a squashed normal distribution, noise on a fixed action.

How much they explore are buffers of the module, so that it travels with the weights to the runners.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import softplus

from rlmesh.envs.modules.distributions import ActionDistribution
from rlmesh.envs.modules.module_policy import ModulePolicy
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.runners.fragments import Fragment

__all__ = ["EpsilonGreedyActions", "NoisyActions", "OffPolicyModulePolicy", "SquashedGaussianActions"]


class OffPolicyModulePolicy(ModulePolicy):
    """A policy that learns from replayed steps, whose fragments need neither log-probabilities nor advantages."""

    def postprocess_fragment(self, fragment: Fragment) -> None:
        """Leave the fragment as it is."""


class EpsilonGreedyActions(ActionDistribution):
    """The action of the largest value, or, with probability ``module.epsilon``, any action; the inputs are values."""

    def __init__(self, module: nn.Module, n: int, start: int) -> None:
        self.size, self.start, self._module = n, start, module

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        epsilon = float(self._module.epsilon)  # type: ignore[arg-type]
        anything = rng.random(shape) < epsilon
        return np.where(anything, rng.integers(self.size, size=shape), -1)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The action of the noise where that is not negative, otherwise the best one."""
        return np.where(noise >= 0, noise + self.start, self.mode(inputs))

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        actions: np.ndarray = inputs.argmax(-1) + self.start
        return actions


class BoundedActions(ActionDistribution):
    """Actions of a bounded Box. A batch has them scaled to [-1, 1]; the environment gets them in its own units.

    While ``module.uniform`` is 1, actions are drawn uniformly.

    Raises:
        UsageError: the space is no Box of floats with finite bounds.
    """

    def __init__(self, module: nn.Module, space: Any) -> None:
        from gymnasium import spaces

        if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
            raise UsageError(f"{type(module).__name__} acts in a Box of floats, not in {space}")
        if not space.is_bounded():
            raise UsageError(f"{type(module).__name__} acts in a Box with finite bounds, not in {space}")
        self.shape, self.dim = tuple(space.shape), math.prod(space.shape)
        self._low, self._high = space.low, space.high
        self._middle, self._half = space.high / 2 + space.low / 2, space.high / 2 - space.low / 2
        ends = [self._scaled(np.full(self.shape, end, np.float32)) for end in (-1, 1)]
        self._exceeds = bool(((ends[0] < self._low) | (ends[1] > self._high)).any())  # by rounding
        self._module = module

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        uniform = rng.uniform(-1, 1, (*shape, self.dim)) if self._uniform else np.full((*shape, self.dim), np.nan)
        normal = rng.standard_normal((*shape, self.dim))
        return np.concatenate([normal, uniform], -1).astype(np.float32)

    @property
    def _uniform(self) -> bool:
        return bool(self._module.uniform)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        normal, uniform = noise[..., : self.dim], noise[..., self.dim :]
        return self._shaped(uniform if self._uniform else self._noisy(inputs, normal))

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        return self._shaped(np.tanh(inputs[..., : self.dim]))

    def _noisy(self, inputs: np.ndarray, normal: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _shaped(self, actions: np.ndarray) -> np.ndarray:
        return actions.reshape(*actions.shape[:-1], *self.shape)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        scaled = self._scaled(actions)
        return np.clip(scaled, self._low, self._high) if self._exceeds else scaled

    def _scaled(self, actions: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = self._middle + self._half * actions
        return scaled.astype(self._half.dtype)


LOG_STD = (-20.0, 2.0)
"""Bounds of the log of the standard deviation (Haarnoja et al. 2018, their code)."""


class SquashedGaussianActions(BoundedActions):
    """The tanh of a normal distribution; the inputs are means, then logs of standard deviations."""

    def __init__(self, module: nn.Module, space: Any) -> None:
        super().__init__(module, space)
        self.size = 2 * self.dim

    def _noisy(self, inputs: np.ndarray, normal: np.ndarray) -> np.ndarray:
        std = np.exp(np.clip(inputs[..., self.dim :], *LOG_STD))
        squashed: np.ndarray = np.tanh(inputs[..., : self.dim] + std * normal)
        return squashed

    def rsample(self, inputs: torch.Tensor, normal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions in [-1, 1], ``[rows, dim]``, as a function of the inputs, and their log-densities ``[rows]``.

        log p(a) = log N(u) − Σ log(1 − tanh²(u)), with log(1 − tanh²(u)) = 2 (log 2 − u − softplus(−2u)), which is
        exact for large u too.
        """
        mean, log_std = inputs[..., : self.dim], inputs[..., self.dim :].clamp(*LOG_STD)
        before = mean + log_std.exp() * normal
        gaussian = -(0.5 * normal.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)
        squeeze = 2 * (math.log(2) - before - softplus(-2 * before)).sum(-1)
        return torch.tanh(before), gaussian - squeeze


class NoisyActions(BoundedActions):
    """The tanh of the inputs, plus normal noise with the standard deviation ``module.noise``, clipped to [-1, 1]."""

    def __init__(self, module: nn.Module, space: Any) -> None:
        super().__init__(module, space)
        self.size = self.dim

    def _noisy(self, inputs: np.ndarray, normal: np.ndarray) -> np.ndarray:
        std = float(self._module.noise)  # type: ignore[arg-type]
        noisy: np.ndarray = np.clip(np.tanh(inputs) + std * normal, -1, 1)
        return noisy
