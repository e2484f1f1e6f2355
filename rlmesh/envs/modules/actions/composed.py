"""Distributions of composed actions: Dict, Tuple, OneOf and Text, from the distributions of their parts.

Actions are rows of `rlmesh.envs.environments.actions.ActionRows`: vectors of the elements of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlmesh.envs.modules.actions.plain import ActionDistribution, CategoricalActions

__all__ = ["ChoiceActions", "ProductActions", "TextActions", "VectorActions"]


class VectorActions(ActionDistribution):
    """The distribution of a plain space whose actions are elements of a longer row: ``[…, width]``.

    Args:
        distribution: of the plain space.
        shape: shape of one of its actions.
    """

    width: int

    def __init__(self, distribution: ActionDistribution, shape: tuple[int, ...]) -> None:
        self.distribution, self.shape = distribution, shape
        self.size, self.width = distribution.size, math.prod(shape)
        self.log_std_inputs = distribution.log_std_inputs

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return self.distribution.noise(rng, shape)

    def _rows(self, actions: np.ndarray) -> np.ndarray:
        return actions.reshape(*actions.shape[: actions.ndim - len(self.shape)], self.width).astype(np.float32)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return self._rows(self.distribution.sample(inputs, noise))

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        return self._rows(self.distribution.mode(inputs))

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        shaped = actions.reshape(*actions.shape[:-1], *self.shape)
        return self._rows(self.distribution.to_env(shaped))

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.distribution.log_prob(inputs, actions.reshape(*actions.shape[:-1], *self.shape))

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.distribution.entropy(inputs)

    def kl(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.distribution.kl(inputs, other)


class ProductActions(ActionDistribution):
    """Independent parts: log-probabilities, entropies and divergences are sums over them (Dict, Tuple).

    Inputs, noise and rows of the parts stand one after the other.
    """

    width: int

    def __init__(self, parts: Sequence[Composed]) -> None:
        self.parts = list(parts)
        self.size, self.width = sum(p.size for p in parts), sum(p.width for p in parts)
        self._inputs = np.cumsum([0, *(p.size for p in parts)]).tolist()
        self._widths = np.cumsum([0, *(p.width for p in parts)]).tolist()
        draw = np.random.default_rng(0)
        self._noises = np.cumsum([0, *(p.noise(draw, ()).shape[-1] for p in parts)]).tolist()
        self.log_std_inputs = [
            start + each for start, p in zip(self._inputs, parts, strict=False) for each in p.log_std_inputs
        ]

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([part.noise(rng, shape) for part in self.parts], -1)

    def sample(self, inputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        each = zip(self.parts, _cut(inputs, self._inputs), _cut(noise, self._noises), strict=True)
        return np.concatenate([part.sample(own, drawn) for part, own, drawn in each], -1)

    def mode(self, inputs: np.ndarray) -> np.ndarray:
        return np.concatenate([p.mode(own) for p, own in zip(self.parts, _cut(inputs, self._inputs), strict=True)], -1)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        each = zip(self.parts, _cut(actions, self._widths), strict=True)
        return np.concatenate([part.to_env(own) for part, own in each], -1)

    def log_probs(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Log-probability of each part, ``[…, parts]``."""
        each = zip(self.parts, _cut(inputs, self._inputs), _cut(actions, self._widths), strict=True)
        return torch.stack([part.log_prob(own, action) for part, own, action in each], -1)

    def entropies(self, inputs: torch.Tensor) -> torch.Tensor:
        """Entropy of each part, ``[…, parts]``."""
        each = zip(self.parts, _cut(inputs, self._inputs), strict=True)
        return torch.stack([part.entropy(own) for part, own in each], -1)

    def kls(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Divergence of each part, ``[…, parts]``."""
        each = zip(self.parts, _cut(inputs, self._inputs), _cut(other, self._inputs), strict=True)
        return torch.stack([part.kl(own, its) for part, own, its in each], -1)

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.log_probs(inputs, actions).sum(-1)

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.entropies(inputs).sum(-1)

    def kl(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.kls(inputs, other).sum(-1)


class _Conditional(ProductActions):
    """A choice, which is the first part, and further parts that are there with probabilities that it decides.

    Attributes:
        least: the smallest choice.
    """

    least = 0

    def _present(self, choice: torch.Tensor) -> torch.Tensor:
        """1 where a further part is there, 0 otherwise, ``[…, parts − 1]``, for choices ``[…]``."""
        raise NotImplementedError

    def _shares(self, inputs: torch.Tensor) -> torch.Tensor:
        """Probability that each further part is there, ``[…, parts − 1]``."""
        choices = self.parts[0].size
        probabilities = torch.softmax(inputs[..., :choices], -1)
        return probabilities @ self._present(torch.arange(choices) + self.least).to(probabilities.dtype)

    def log_prob(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        each = self.log_probs(inputs, actions)
        return each[..., 0] + torch.where(self._present(actions[..., 0].long()).bool(), each[..., 1:], 0.0).sum(-1)

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        each = self.entropies(inputs)
        return each[..., 0] + (self._shares(inputs) * each[..., 1:]).sum(-1)

    def kl(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        each = self.kls(inputs, other)
        return each[..., 0] + (self._shares(inputs) * each[..., 1:]).sum(-1)


class ChoiceActions(_Conditional):
    """One of several parts (OneOf). Parts that are not chosen are drawn too, and count nothing."""

    def __init__(self, parts: Sequence[Composed]) -> None:
        super().__init__([VectorActions(CategoricalActions(len(parts)), ()), *parts])

    def _present(self, choice: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(choice, len(self.parts) - 1)


class TextActions(_Conditional):
    """A text: its length, then each of its characters independently; places behind its end count nothing.

    Args:
        least, most: bounds of the length.
        characters: number of different characters.
    """

    def __init__(self, least: int, most: int, characters: int) -> None:
        self.least = least
        length = VectorActions(CategoricalActions(most - least + 1, least), ())
        super().__init__([length, *(VectorActions(CategoricalActions(characters), ()) for _ in range(most))])

    def _present(self, choice: torch.Tensor) -> torch.Tensor:
        return (torch.arange(len(self.parts) - 1) < choice.unsqueeze(-1)).long()


Composed = VectorActions | ProductActions


def _cut(values: Any, edges: list[int]) -> Iterator[Any]:
    """Consecutive slices of the last axis."""
    for start, end in pairwise(edges):
        yield values[..., start:end]
