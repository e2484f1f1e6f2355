"""The module of DQN: the values of all actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlmesh.envs.batches import columns
from rlmesh.envs.modules.encoders import encoder_of, initialize, mlp
from rlmesh.envs.modules.exploration import EpsilonGreedyActions
from rlmesh.envs.modules.recurrent import ATTENTION_DEFAULTS, LSTM_DEFAULTS, State, memory_of
from rlmesh.envs.modules.rl_module import OFF_POLICY_DEFAULTS, RLModule
from rlmesh.envs.settings.model import MODEL_ALLOWED
from rlmesh.errors import UsageError

__all__ = ["QModule"]


class QModule(RLModule):
    """Values Q(s, a) of discrete actions, and epsilon-greedy exploration with ``epsilon`` as a buffer.

    With ``dueling``, Q(s, a) = V(s) + A(s, a) − mean A(s, ·) (Wang et al. 2016, equation 9). With ``use_lstm`` or
    ``use_attention``, a memory follows the encoder.
    """

    known_settings: Mapping[str, Any] = {
        **OFF_POLICY_DEFAULTS, **LSTM_DEFAULTS, **ATTENTION_DEFAULTS, "fcnet_hiddens": (128, 128),
        "fcnet_activation": "relu", "dueling": True,
    }  # fmt: skip
    allowed_settings = MODEL_ALLOWED

    def setup(self) -> None:
        from gymnasium import spaces

        space = self.action_space
        if not isinstance(space, spaces.Discrete):
            raise UsageError(f"DQN acts in a Discrete space, not in {space}; SAC and TD3 act in a Box")
        self.n = int(space.n)
        self.encoder, width = encoder_of(self.observation_space, self.model_config)
        self.memory = memory_of(self.model_config, width)
        width = width if self.memory is None else self.memory.size
        self.dueling = bool(self.model_config["dueling"])
        self.head = mlp([width, self.n + self.dueling], "relu", last_gain=0.01)
        initialize(self, self.model_config["initializer"])
        self.register_buffer("epsilon", torch.tensor(1.0))
        self.distribution = EpsilonGreedyActions(self, self.n, int(space.start))

    def values(self, obs: torch.Tensor) -> torch.Tensor:
        """Values ``[rows, actions]`` of observations."""
        return self._of_features(self.encoder(obs))

    def values_over(self, obs: torch.Tensor, states: State) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Values ``[sequences, time, actions]`` of sequences that begin with these states, and states after them."""
        assert self.memory is not None
        features, after = self.memory(self.encoder(obs), states)
        return self._of_features(features), after

    def _of_features(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(features)
        if not self.dueling:
            return out
        advantages = out[..., 1:]
        return out[..., :1] + advantages - advantages.mean(-1, keepdim=True)

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        return {} if self.memory is None else self.memory.initial_state()

    def forward_train(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if self.memory is not None:
            values, after = self.values_over(batch[columns.OBS], batch[columns.STATE_IN])
            return {columns.ACTION_DIST_INPUTS: values, columns.STATE_OUT: after}
        return {columns.ACTION_DIST_INPUTS: self.values(batch[columns.OBS])}

    def compute_values(self, batch: Mapping[str, Any]) -> torch.Tensor:
        values: torch.Tensor = self.forward_train(batch)[columns.ACTION_DIST_INPUTS]
        return values.amax(-1)

    def exploration_layers(self) -> nn.Module | None:
        if self.memory is not None:
            return None
        head = self.head[0]
        if not self.dueling:
            return nn.Sequential(self.encoder, head)
        combine = torch.cat([torch.ones(self.n, 1), torch.eye(self.n) - 1 / self.n], 1)
        joined = nn.Linear(head.in_features, self.n)  # type: ignore[arg-type]
        with torch.no_grad():
            joined.weight.copy_(combine @ head.weight)  # type: ignore[operator]
            joined.bias.copy_(combine @ head.bias)  # type: ignore[operator]
        return nn.Sequential(self.encoder, joined)
