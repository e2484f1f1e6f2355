"""The modules of SAC and TD3: an actor for bounded actions, and two critics that are computed together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from rlmesh.envs.batches import columns
from rlmesh.envs.modules.encoders import ACTIVATIONS, Features, ImageEncoder, initialize, is_image, mlp
from rlmesh.envs.modules.exploration import NoisyActions, SquashedGaussianActions
from rlmesh.envs.modules.rl_module import MODEL_DEFAULTS, RLModule

__all__ = ["SACModule", "TD3Module", "TwinCritic"]


class TwinLinear(nn.Module):
    """Two linear layers of the same shape, computed by one product: ``[2, rows, inputs]`` to ``[2, rows, outputs]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class TwinCritic(nn.Module):
    """Two estimates of Q(s, a), ``[2, rows]``; images have an encoder that both share."""

    def __init__(self, space: Any, actions: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.features, width = features_of(space, config)
        activation = ACTIVATIONS[config["fcnet_activation"]]
        layers: list[nn.Module] = []
        hidden: Sequence[int] = config["fcnet_hiddens"]
        for inputs, outputs in pairwise([width + actions, *hidden]):
            layers += [TwinLinear(inputs, outputs), activation()]
        self.layers = nn.Sequential(*layers, TwinLinear(hidden[-1] if hidden else width + actions, 1))

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.features(obs), actions.reshape(len(actions), -1)], -1)
        values: torch.Tensor = self.layers(x.expand(2, *x.shape)).squeeze(-1)
        return values


def features_of(space: Any, config: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """The features of an observation space before the hidden layers, and their number."""
    features = (
        ImageEncoder(space, config["conv_filters"], config["conv_features"]) if is_image(space) else Features(space)
    )
    return features, features.size


class ActorAndCritics(RLModule):
    """Base of both modules. ``uniform`` is 1 while actions are drawn uniformly."""

    known_settings: Mapping[str, Any] = {
        **MODEL_DEFAULTS, "fcnet_hiddens": (256, 256), "fcnet_activation": "relu",
    }  # fmt: skip

    def _build(self, outputs: int) -> None:
        config = self.model_config
        features, width = features_of(self.observation_space, config)
        body = mlp([width, *config["fcnet_hiddens"], outputs], config["fcnet_activation"], last_gain=0.01)
        self.actor = nn.Sequential(features, *body)
        self.critic = TwinCritic(self.observation_space, math.prod(self.action_space.shape), config)
        initialize(self, config["initializer"])
        self.register_buffer("uniform", torch.tensor(1.0))

    def forward_train(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {columns.ACTION_DIST_INPUTS: self.actor(batch[columns.OBS])}

    def compute_values(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The smaller Q of the best action."""
        size = math.prod(self.action_space.shape)
        best = torch.tanh(self.actor(batch[columns.OBS])[..., :size])
        values: torch.Tensor = self.critic(batch[columns.OBS], best).amin(0)
        return values

    def exploration_layers(self) -> nn.Module | None:
        return self.actor


class SACModule(ActorAndCritics):
    """Soft actor-critic: a squashed normal distribution, and two critics."""

    distribution: SquashedGaussianActions

    def setup(self) -> None:
        self.distribution = SquashedGaussianActions(self, self.action_space)
        self._build(self.distribution.size)


class TD3Module(ActorAndCritics):
    """Twin delayed DDPG: a deterministic actor, with noise to explore, and two critics."""

    distribution: NoisyActions

    def setup(self) -> None:
        self.distribution = NoisyActions(self, self.action_space)
        self._build(self.distribution.size)
        self.register_buffer("noise", torch.tensor(0.0))
