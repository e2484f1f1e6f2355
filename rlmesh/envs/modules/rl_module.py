"""`RLModule`: the networks of a policy, with a forward pass for each phase of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlmesh.envs.batches import columns
from rlmesh.envs.modules.dense import through
from rlmesh.envs.modules.distributions import (
    ActionDistribution,
    CategoricalActions,
    GaussianActions,
    distribution_of,
)
from rlmesh.envs.modules.encoders import LogStdColumns, encoder_of, initialize, is_image, mlp
from rlmesh.envs.modules.recurrent import ATTENTION_DEFAULTS, LSTM_DEFAULTS, memory_of
from rlmesh.envs.settings.allowed import Allowed, faults_of
from rlmesh.envs.settings.model import MODEL_ALLOWED, OF_ACTOR_CRITIC, unknown_keys
from rlmesh.errors import UsageError

__all__ = ["MODEL_DEFAULTS", "OFF_POLICY_DEFAULTS", "ActorCriticModule", "RLModule", "require_one_per_row"]

MODEL_DEFAULTS: dict[str, Any] = {
    "fcnet_hiddens": (64, 64),
    "fcnet_activation": "tanh",
    "conv_filters": None,
    "conv_features": 512,
    "vf_share_layers": None,
    "log_std_init": 0.0,
    "initializer": "orthogonal",
}
"""Settings of the built-in modules. ``vf_share_layers=None``: only convolutions are shared by policy and value.

``initializer`` is of linear layers and convolutions: ``"orthogonal"``, with gain √2 in hidden layers, 0.01 before
actions and values of actions, and zero biases; or ``"torch"``, torch's own, which RLlib uses.
"""


OFF_POLICY_DEFAULTS = {name: value for name, value in MODEL_DEFAULTS.items() if name not in OF_ACTOR_CRITIC}
"""Settings of the built-in modules without a value function beside the policy."""


class RLModule(nn.Module):
    """Base of modules: a subclass builds its networks in `setup` and defines `forward_train`.

    A batch is a dict of tensors, ``obs`` among them. Forward passes return a dict: ``action_dist_inputs`` are the
    parameters of `distribution`, ``[rows, distribution.size]``; ``vf_preds`` are values, ``[rows]``. A module may
    return ``actions`` itself, with ``action_logp`` where the algorithm needs log-probabilities.

    A module with memory returns its state at the start of an episode from `get_initial_state`. Its passes then get
    sequences, ``obs`` ``[sequences, time, …]``, with the states before them in ``state_in``, a dict of tensors
    ``[sequences, …]``; they return results ``[sequences, time, …]``, and ``state_out``, the states after the last
    step. Runners pass sequences of one step. Learners pass sequences that are padded with zeros at their ends, and
    ``mask`` ``[sequences, time]``, which is true where there is a step.

    Args:
        observation_space: Gymnasium's space of a row of observations.
        action_space: Gymnasium's action space.
        model_config: settings; unknown keys are refused, with the nearest right one.

    Attributes:
        distribution: of the actions.
        known_settings: keys of ``model_config`` and their defaults; a subclass adds its own.
        allowed_settings: the values that keys may have; keys without a rule may have any.
    """

    known_settings: Mapping[str, Any] = MODEL_DEFAULTS
    allowed_settings: Mapping[str, Allowed] = {}

    def __init__(
        self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.observation_space, self.action_space = observation_space, action_space
        self.model_config = self.settings(model_config)
        self.distribution: ActionDistribution | None = None
        self.setup()

    @classmethod
    def settings(cls, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The settings with defaults filled in.

        Raises:
            UsageError: an unknown key, or a value that is not allowed.
        """
        faults = [*unknown_keys("model_config", given or {}, cls.known_settings)]
        if faults := faults or faults_of(given or {}, cls.allowed_settings, prefix="model_config "):
            raise UsageError("; ".join(faults))
        return {**cls.known_settings, **(given or {})}

    def setup(self) -> None:
        """Build the networks."""

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        """The state at the start of an episode, tensors without the axis of sequences; empty without memory."""
        return {}

    def is_stateful(self) -> bool:
        """True if the module has memory."""
        return bool(self.get_initial_state())

    def forward_train(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The pass of a loss, with gradients."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_train")

    def forward_exploration(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The pass that samples for training; without gradients."""
        return self.forward_train(batch)

    def forward_inference(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The pass that takes the best actions; without gradients."""
        return self.forward_exploration(batch)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self.forward_train(batch)

    def compute_values(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Values of observations, ``[rows]``; of a module with memory ``[sequences, time]``."""
        values: torch.Tensor = self.forward_train(batch)[columns.VF_PREDS]
        return values

    def exploration_layers(self) -> nn.Module | None:
        """The layers from ``obs`` to ``action_dist_inputs``, if plain layers are all there is; None otherwise.

        A runner evaluates small stacks of linear layers in NumPy instead of calling `forward_exploration`, unless a
        subclass of the class that defines this method overrides a forward pass or ``values``.
        """
        return None

    def layers_to_act(self, *, explore: bool) -> nn.Module | None:
        """`exploration_layers`, or None if a forward pass to act is defined by a class derived from theirs."""
        passes = ["forward_train", "forward_exploration", "values"] + ["forward_inference"] * (not explore)
        for kind in type(self).__mro__:
            if "exploration_layers" in vars(kind):
                return self.exploration_layers()
            if any(name in vars(kind) for name in passes):
                return None
        return None


def require_one_per_row(module: RLModule, results: Mapping[str, Any], axes: int = 1) -> None:
    """Refuse values and log-probabilities with another form than one number per row.

    Those of shape ``[rows, 1]``, less those of shape ``[rows]``, are ``[rows, rows]``: a loss that means nothing.

    Args:
        results: of a pass, tensors or arrays, with rows along this number of ``axes``.

    Raises:
        UsageError: a result has further axes.
    """
    for name in (columns.VF_PREDS, columns.ACTION_LOGP):
        if name in results and results[name].ndim != axes:
            raise UsageError(
                f"{type(module).__name__} returned {name!r} with {results[name].ndim - axes + 1} axes: it has one "
                "number for each row, [rows], as .squeeze(-1) makes of the output of a layer"
            )


class ActorCriticModule(RLModule):
    """A policy and a value function: MLPs for vectors, convolutions for images; see `MODEL_DEFAULTS`.

    With ``use_lstm`` or ``use_attention``, a memory follows the encoder, and policy and value share both; see
    `rlmesh.envs.modules.recurrent`.
    """

    known_settings: Mapping[str, Any] = {**MODEL_DEFAULTS, **LSTM_DEFAULTS, **ATTENTION_DEFAULTS}
    allowed_settings = MODEL_ALLOWED
    distribution: ActionDistribution

    def setup(self) -> None:
        config = self.model_config
        distribution = self.distribution = distribution_of(self.action_space)
        shares = config["vf_share_layers"]
        self.shares = is_image(self.observation_space) if shares is None else bool(shares)
        self.encoder, width = encoder_of(self.observation_space, config)
        self.memory = memory_of(config, width)
        if self.memory is not None:
            if shares is not None and not shares:
                raise UsageError(
                    "model_config vf_share_layers=False: with use_lstm or use_attention, policy and value share the "
                    "encoder and the memory; leave the key out"
                )
            self.shares, width = True, self.memory.size
        self.value_encoder = None if self.shares else encoder_of(self.observation_space, config)[0]
        if isinstance(distribution, GaussianActions):
            means = mlp([width, distribution.dim], "tanh", last_gain=0.01)
            self.policy_head = nn.Sequential(*means, LogStdColumns(distribution.dim, config["log_std_init"]))
        else:
            self.policy_head = mlp([width, distribution.size], "tanh", last_gain=0.01)
        self.value_head = mlp([width, 1], "tanh", last_gain=1.0)
        initialize(self, config["initializer"])
        if isinstance(self.policy_head[-1], nn.Linear) and distribution.log_std_inputs:  # Box parts of composed actions
            with torch.no_grad():
                self.policy_head[-1].bias[list(distribution.log_std_inputs)] = config["log_std_init"]

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        return {} if self.memory is None else self.memory.initial_state()

    def forward_train(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        obs, more = batch[columns.OBS], {}
        if self.value_encoder is not None:
            return {
                columns.ACTION_DIST_INPUTS: through(obs, self.encoder, self.policy_head),
                columns.VF_PREDS: through(obs, self.value_encoder, self.value_head).squeeze(-1),
            }
        features = through(obs, self.encoder)
        if self.memory is not None:
            features, more[columns.STATE_OUT] = self.memory(features, batch[columns.STATE_IN])
        return {
            columns.ACTION_DIST_INPUTS: self.policy_head(features),
            columns.VF_PREDS: self.value_head(features).squeeze(-1),
            **more,
        }

    def forward_exploration(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if self.shares or type(self).forward_train is not ActorCriticModule.forward_train:
            return self.forward_train(batch)  # a subclass may change the logits there alone
        return {columns.ACTION_DIST_INPUTS: through(batch[columns.OBS], self.encoder, self.policy_head)}

    def compute_values(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Values of observations, ``[rows]``, by the value head alone, unless a subclass has a `forward_train`."""
        if self.memory is not None or type(self).forward_train is not ActorCriticModule.forward_train:
            return super().compute_values(batch)
        encoder = self.encoder if self.value_encoder is None else self.value_encoder
        return through(batch[columns.OBS], encoder, self.value_head).squeeze(-1)

    def exploration_layers(self) -> nn.Module | None:
        return nn.Sequential(self.encoder, self.policy_head) if self.memory is None else None


def numpy_description(module: ActorCriticModule) -> dict[str, Any] | None:
    """The layers to act and to value, by the names of their weights; None if NumPy cannot evaluate them."""
    from rlmesh.envs.modules.numpy_forward import layers_by_name

    acting, encoder = module.exploration_layers(), module.value_encoder
    if acting is None or encoder is None or type(module.distribution) not in (CategoricalActions, GaussianActions):
        return None
    acts, values_by = (layers_by_name(n, module) for n in (acting, nn.Sequential(encoder, module.value_head)))
    return None if acts is None or values_by is None else {"acts": acts, "values": values_by}
