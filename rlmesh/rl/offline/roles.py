"""Roles that train a policy or a reward model on responses of the data."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlmesh import current_worker, rpc
from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.protocol import TrainingEngine
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.trained import TRAINING
from rlmesh.rl.roles.value_head import value_model

__all__ = ["OfflineActor", "RewardModelRole"]

HEAD = "head"
"""The name of the head in a `ValueModel`."""


class OfflineActor(ActorRole):
    """The policy in training without rollout engines: its weights are never pushed."""

    def offer_weights(self) -> None:
        """Offers nothing: no engine takes the weights."""


class RewardModelRole(CriticRole):
    """Trains a model with one label, with the actor's settings. It begins with the layers of the run's model, and with
    the model's head if this has one label, else with a head of zeros."""

    section = "actor"

    def make_model(self) -> nn.Module:
        model = value_model(self.run_settings.model)
        # The loss does not depend on a bias, and classifiers of transformers have none.
        model.head.bias = None  # type: ignore[assignment]
        return model.to(self.device)

    def make_engine(self) -> TrainingEngine:
        """See `TrainedRole.make_engine`. An adapter is of the head too: a head of zeros that stays as it is gives every
        response the value 0, and no layer a gradient."""
        lora = self.settings.lora
        if lora.rank and not isinstance(lora.target_modules, str):
            targets = list(dict.fromkeys([*lora.target_modules, HEAD]))
            self.settings = replace(self.settings, lora=replace(lora, target_modules=targets))
        return super().make_engine()

    @rpc
    def export(self, folder: str) -> None:
        """Write the model as a folder that ``AutoModelForSequenceClassification.from_pretrained`` reads."""
        aside = Path(folder).with_name(".critic")
        with self.turns.turn(TRAINING):
            self.engine.export(aside)
        if current_worker().rank == 0:
            as_classifier(aside, self.run_settings.model).save_pretrained(folder)
            shutil.rmtree(aside)


def as_classifier(folder: Path, model: str) -> Any:
    """A classifier of transformers with one label, with the weights of a `ValueModel`.

    Raises:
        UsageError: transformers has no classifier of this kind, or the weights do not fit.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model, num_labels=1)
    made: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    inner = made.base_model_prefix
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            state[name.replace("backbone.", f"{inner}.", 1).replace("head.", "score.", 1)] = tensor
    missing, unexpected = made.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise UsageError(f"{type(made).__name__} does not fit the weights: {[*missing, *unexpected][:5]} differ")
    return made
