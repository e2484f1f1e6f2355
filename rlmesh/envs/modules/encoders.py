"""Encoders: networks from observations to features."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.modules.activations import Tanh
from rlmesh.envs.settings.model import INITIALIZERS
from rlmesh.errors import UsageError

__all__ = ["ACTIVATIONS", "Features", "ImageEncoder", "LogStdColumns", "encoder_of", "initialize", "is_image", "mlp"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": Tanh, "relu": nn.ReLU, "silu": nn.SiLU, "elu": nn.ELU, "gelu": nn.GELU,
}  # fmt: skip
CONV_FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of each layer (Mnih et al. 2015), for images of 84 × 84."""


def mlp(sizes: Sequence[int], activation: str, *, last_gain: float | None = None) -> nn.Sequential:
    """Linear layers with activations between them, initialised orthogonally.

    Args:
        sizes: widths, from the input to the output.
        activation: a name of `ACTIVATIONS`.
        last_gain: gain of a last layer without activation; None: the last layer has an activation too.
    """
    if activation not in ACTIVATIONS:
        raise UsageError(f"there is no activation {activation!r}.{did_you_mean(activation, ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for i, (width, wider) in enumerate(pairwise(sizes)):
        linear = nn.Linear(width, wider)
        is_last = last_gain is not None and i == len(sizes) - 2
        nn.init.orthogonal_(linear.weight, last_gain if is_last and last_gain is not None else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear] if is_last else [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def initialize(network: nn.Module, initializer: str) -> None:
    """Draw the weights of linear layers and convolutions anew as torch does, unless they are to stay orthogonal.

    Args:
        initializer: a name of `INITIALIZERS`.
    """
    if initializer not in INITIALIZERS:
        raise UsageError(
            f"model_config: there is no initializer {initializer!r}.{did_you_mean(str(initializer), INITIALIZERS)}"
        )
    if initializer == "torch":
        for layer in network.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.reset_parameters()


class Features(nn.Module):
    """Observations of plain spaces as float vectors: Box flattened, Discrete and MultiDiscrete one-hot."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        from gymnasium import spaces

        self.sizes: list[int] = []
        self.starts: list[int] = []
        if isinstance(space, spaces.Discrete):
            self.sizes, self.starts = [int(space.n)], [int(space.start)]
        elif isinstance(space, spaces.MultiDiscrete):
            self.sizes, self.starts = space.nvec.ravel().tolist(), space.start.ravel().tolist()
        self.rank = len(space.shape or ())
        self.size = sum(self.sizes) if self.sizes else math.prod(space.shape or (1,))
        self.is_plain = not self.sizes and self.rank == 1
        """True if a row of floats is its own features."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        flat = obs.flatten(-self.rank) if self.rank > 1 else obs if self.rank == 1 else obs.unsqueeze(-1)
        if not self.sizes:
            return flat.float()
        each = zip(flat.long().unbind(-1), self.starts, self.sizes, strict=True)
        return torch.cat([nn.functional.one_hot(part - start, n) for part, start, n in each], -1).float()


class LogStdColumns(nn.Module):
    """Appends learnt logs of standard deviations, the same for all states, to the means."""

    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((dim,), start))

    def forward(self, means: torch.Tensor) -> torch.Tensor:
        return torch.cat([means, self.log_std.expand_as(means)], -1)


def is_image(space: Any) -> bool:
    """True for Box spaces of three axes that are large enough for convolutions."""
    return type(space).__name__ == "Box" and len(space.shape) == 3 and sorted(space.shape)[1] >= 16


class ImageEncoder(nn.Module):
    """Convolutions over images, ``[…, height, width, channels]`` or ``[…, channels, height, width]``.

    The shorter of the first and the last axis is that of the channels. Bytes are scaled to [0, 1].
    """

    def __init__(self, space: Any, filters: Iterable[Sequence[int]] | None, width: int) -> None:
        super().__init__()
        shape = space.shape
        self.channels_last = shape[-1] <= shape[0]
        channels = shape[-1] if self.channels_last else shape[0]
        self.scale = 1 / 255 if space.dtype == np.uint8 else 1.0
        layers: list[nn.Module] = []
        for out, kernel, stride in filters or CONV_FILTERS:
            conv = nn.Conv2d(channels, out, kernel, stride)
            nn.init.orthogonal_(conv.weight, math.sqrt(2))
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)
            layers += [conv, nn.ReLU()]
            channels = out
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        try:
            with torch.no_grad():
                flat = self.convolutions(self._image(torch.zeros((1, *shape)))).shape[-1]
        except RuntimeError as error:
            raise UsageError(
                f"the convolutions do not fit images of {shape}: {error}. Set model_config conv_filters to a list of "
                "[channels, kernel, stride]"
            ) from None
        self.head = mlp([flat, width], "relu")
        self.size = width

    def _image(self, obs: torch.Tensor) -> torch.Tensor:
        image = obs.movedim(-1, -3) if self.channels_last else obs
        return image.float() * self.scale

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        lead = obs.shape[:-3]
        features: torch.Tensor = self.head(self.convolutions(self._image(obs.reshape(-1, *obs.shape[-3:]))))
        return features.reshape(*lead, self.size)


def encoder_of(space: Any, config: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """The encoder of an observation space, and the number of its features."""
    if is_image(space):
        encoder = ImageEncoder(space, config["conv_filters"], config["conv_features"])
        return encoder, encoder.size
    features = Features(space)
    hidden = list(config["fcnet_hiddens"])
    if not hidden:
        return features, features.size
    layers = mlp([features.size, *hidden], config["fcnet_activation"])
    return nn.Sequential(features, *layers), hidden[-1]
