"""Distributions of plain actions: Discrete, MultiDiscrete, Box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["ActionDistribution", "CategoricalActions", "GaussianActions", "MultiCategoricalActions"]


class ActionDistribution:
    """A family of distributions over one action space; the parameters are ``inputs``, ``[…, size]``.

    Attributes:
        size: number of inputs.
        log_std_inputs: places of inputs that are logs of standard deviations.
    """

    size: int
    log_std_inputs: Sequence[int] = ()

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Random numbers for ``shape`` samples, drawn at once for a whole fragment."""
        raise NotImplementedError

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """One action for each row of inputs and noise."""
        raise NotImplementedError

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        """The most probable action for each row."""
        raise NotImplementedError

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """The actions as the environment takes them."""
        return actions

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Log-probability, or log-density, of actions, ``[…]``."""
        raise NotImplementedError

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        """Entropy in nats, ``[…]``."""
        raise NotImplementedError

    def kl(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Kullback-Leibler divergence from the distribution of ``inputs`` to that of ``other``, ``[…]``."""
        raise NotImplementedError


class CategoricalActions(ActionDistribution):
    """One of n actions; the inputs are logits. Samples by the Gumbel-max trick (Gumbel 1954)."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.size, self.start = n, start

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.gumbel(size=(*shape, self.size)).astype(np.float32)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        actions: np.ndarray = (inputs + noise).argmax(-1) + self.start
        return actions

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        actions: np.ndarray = inputs.argmax(-1) + self.start
        return actions

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        chosen = actions.long().unsqueeze(-1)
        if self.start:
            chosen = chosen - self.start
        return torch.log_softmax(inputs, -1).gather(-1, chosen).squeeze(-1)

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        logs = torch.log_softmax(inputs, -1)
        return -(logs.exp() * logs).sum(-1)

    def kl(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        logs = torch.log_softmax(inputs, -1)
        return (logs.exp() * (logs - torch.log_softmax(other, -1))).sum(-1)


class MultiCategoricalActions(ActionDistribution):
    """Several independent choices; the inputs are their logits, one after the other.

    Args:
        sizes, starts: number of values of each choice, and its smallest value.
        shape: shape of an action; None: one axis.
    """

    def __init__(
        self, sizes: Sequence[int], starts: Sequence[int], shape: tuple[int, ...] | None = None
    ) -> None:  # fmt: skip
        self.parts = [CategoricalActions(n, start) for n, start in zip(sizes, starts, strict=True)]
        self.shape = (len(self.parts),) if shape is None else shape
        self.size = sum(sizes)
        self._edges = np.cumsum([0, *sizes]).tolist()

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.gumbel(size=(*shape, self.size)).astype(np.float32)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return self.mode(inputs + noise)

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        each = [part.mode(own) for part, own in zip(self.parts, self._split(inputs), strict=True)]
        return np.stack(each, -1).reshape(*inputs.shape[:-1], *self.shape)

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        flat = actions.reshape(*inputs.shape[:-1], len(self.parts))
        each = zip(self.parts, self._split(inputs), flat.unbind(-1), strict=True)
        return torch.stack([part.log_prob(logits, action) for part, logits, action in each]).sum(0)

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.entropy(each) for p, each in zip(self.parts, self._split(inputs), strict=True)]).sum(0)

    def kl(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        each = zip(self.parts, self._split(inputs), self._split(other), strict=True)
        return torch.stack([part.kl(one, two) for part, one, two in each]).sum(0)

    def _split(self, inputs: Any) -> list[Any]:
        return [inputs[..., a:b] for a, b in zip(self._edges, self._edges[1:], strict=False)]


class GaussianActions(ActionDistribution):
    """Independent normal distributions; the inputs are means, then logs of standard deviations.

    A batch has actions as they were drawn, which the densities are of. The environment gets them clipped to its space.
    """

    def __init__(self, shape: tuple[int, ...], low: np.ndarray, high: np.ndarray) -> None:
        self.shape, self.low, self.high = shape, low, high
        self.dim = math.prod(shape)
        self.size = 2 * self.dim
        self.log_std_inputs = range(self.dim, self.size)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal((*shape, self.dim), np.float32)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        actions: np.ndarray = inputs[..., : self.dim] + np.exp(inputs[..., self.dim :]) * noise
        shaped: np.ndarray = actions.reshape(*actions.shape[:-1], *self.shape)
        return shaped

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        means: np.ndarray = np.reshape(inputs[..., : self.dim], (*inputs.shape[:-1], *self.shape))
        return means

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        clipped: np.ndarray = np.clip(actions, self.low, self.high)
        return clipped

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        mean, log_std = inputs[..., : self.dim], inputs[..., self.dim :]
        scaled = (actions.reshape(mean.shape).to(mean.dtype) - mean) * torch.exp(-log_std)
        result: torch.Tensor = -(0.5 * scaled.square() + log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * self.dim
        return result

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[..., self.dim :].sum(-1) + 0.5 * math.log(2 * math.pi * math.e) * self.dim

    def kl(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        mean, log_std = inputs[..., : self.dim], inputs[..., self.dim :]
        mean2, log_std2 = other[..., : self.dim], other[..., self.dim :]
        ratio = (torch.exp(2 * log_std) + (mean - mean2).square()) * torch.exp(-2 * log_std2)
        result: torch.Tensor = (log_std2 - log_std + 0.5 * (ratio - 1)).sum(-1)
        return result
