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
from rlmesh.envs.modules.recurrent import ATTENTION_DEFAULTS, LSTM_DEFAULTS, RememberedFeatures, SequenceSteps
from rlmesh.envs.modules.rl_module import OFF_POLICY_DEFAULTS, RLModule
from rlmesh.envs.settings.model import MODEL_ALLOWED

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
    """Two estimates of Q(s, a), ``[2, rows]``; an encoder of images, and a memory, is shared by both."""

    def __init__(self, space: Any, actions: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.features, width = features_of(space, config, "critic_")
        activation = ACTIVATIONS[config["fcnet_activation"]]
        layers: list[nn.Module] = []
        hidden: Sequence[int] = config["fcnet_hiddens"]
        for inputs, outputs in pairwise([width + actions, *hidden]):
            layers += [TwinLinear(inputs, outputs), activation()]
        self.layers = nn.Sequential(*layers, TwinLinear(hidden[-1] if hidden else width + actions, 1))

    def forward(self, obs: torch.Tensor | SequenceSteps, actions: torch.Tensor) -> torch.Tensor:
        """The values of actions ``[rows, …]``, in [-1, 1], for observations ``[rows, …]``, or steps of sequences."""
        return self.of_features(self.features(obs), actions)

    def of_features(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """The values of actions for features ``[rows, …]``."""
        x = torch.cat([features, actions.reshape(len(actions), -1).to(features.dtype)], -1)
        values: torch.Tensor = self.layers(x.expand(2, *x.shape)).squeeze(-1)
        return values


def features_of(space: Any, config: Mapping[str, Any], prefix: str) -> tuple[nn.Module, int]:
    """The features of an observation space before the hidden layers, and their number.

    With ``use_lstm`` or ``use_attention``, they come from an encoder with hidden layers and a memory, whose states have
    names with this prefix.
    """
    features: RememberedFeatures | ImageEncoder | Features
    if config.get("use_lstm") or config.get("use_attention"):
        features = RememberedFeatures(space, config, prefix)
    elif is_image(space):
        features = ImageEncoder(space, config["conv_filters"], config["conv_features"])
    else:
        features = Features(space)
    return features, features.size


class ActorAndCritics(RLModule):
    """Base of both modules. ``uniform`` is 1 while actions are drawn uniformly.

    With memory, actor and critics have one each, since a shared one would follow two losses that work against each
    other (Ni et al. 2022, section 4.2). The state of the critics' memory is recorded with that of the actor.
    """

    known_settings: Mapping[str, Any] = {
        **OFF_POLICY_DEFAULTS, **LSTM_DEFAULTS, **ATTENTION_DEFAULTS, "fcnet_hiddens": (256, 256),
        "fcnet_activation": "relu",
    }  # fmt: skip
    allowed_settings = MODEL_ALLOWED

    def _build(self, outputs: int) -> None:
        config = self.model_config
        features, width = features_of(self.observation_space, config, "")
        hidden = () if isinstance(features, RememberedFeatures) else config["fcnet_hiddens"]  # they precede a memory
        body = mlp([width, *hidden, outputs], config["fcnet_activation"], last_gain=0.01)
        self.actor = nn.Sequential(features, *body)
        self.critic = TwinCritic(self.observation_space, math.prod(self.action_space.shape), config)
        initialize(self, config["initializer"])
        self.register_buffer("uniform", torch.tensor(1.0))

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        actor, critic = self.actor[0], self.critic.features
        if not (isinstance(actor, RememberedFeatures) and isinstance(critic, RememberedFeatures)):
            return {}
        return {**actor.initial_state(), **critic.initial_state()}

    def forward_train(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        actor, critic = self.actor[0], self.critic.features
        if not (isinstance(actor, RememberedFeatures) and isinstance(critic, RememberedFeatures)):
            return {columns.ACTION_DIST_INPUTS: self.actor(batch[columns.OBS])}
        features, after = actor.over(batch[columns.OBS], batch[columns.STATE_IN])
        _, after_critic = critic.over(batch[columns.OBS], batch[columns.STATE_IN])
        return {columns.ACTION_DIST_INPUTS: self.actor[-1](features), columns.STATE_OUT: {**after, **after_critic}}

    def compute_values(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The smaller Q of the best action."""
        inputs = self.forward_train(batch)[columns.ACTION_DIST_INPUTS]
        best = torch.tanh(inputs[..., : math.prod(self.action_space.shape)])
        critic = self.critic.features
        if not isinstance(critic, RememberedFeatures):
            values: torch.Tensor = self.critic(batch[columns.OBS], best).amin(0)
            return values
        features, _ = critic.over(batch[columns.OBS], batch[columns.STATE_IN])
        return self.critic.of_features(features.flatten(0, 1), best.flatten(0, 1)).amin(0).reshape(features.shape[:2])

    def exploration_layers(self) -> nn.Module | None:
        return None if isinstance(self.actor[0], RememberedFeatures) else self.actor


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
