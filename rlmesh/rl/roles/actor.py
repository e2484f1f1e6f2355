"""`ActorRole`: one rank of the policy in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlmesh import SendsWeights, rpc
from rlmesh.rl.algorithms.protocol import Normalisers
from rlmesh.rl.components import policy_share
from rlmesh.rl.engines.training.packed import PackedPart
from rlmesh.rl.packing import Pack
from rlmesh.rl.roles.host_copy import HostCopy
from rlmesh.rl.roles.trained import TRAINING, Share, TrainedRole, common_metrics, mean_of

__all__ = ["ActorRole", "Share"]

MEANS = {"clipped": "clip_fraction", "ratio": "ratio_mean", "entropy": "entropy", "kl": "kl_step"}


class ActorRole(TrainedRole, SendsWeights):
    """Trains the policy on packs, and gives its weights to the rollout engines.

    Every method is collective: the trainer calls it on all ranks at once. Override `make_model` for a model of your
    own, or `loss` for another loss.
    """

    section = "actor"
    host_copy: HostCopy | None = None
    """The weights of the last step, for a push while the engine sleeps; ``None``: the engine never sleeps."""

    def make_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.run_settings.model, dtype=torch.float32)
        return model.to(self.device)

    @rpc
    def log_probs(self, packs: Sequence[Pack], version: int) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of this rank's packs, ``[targets]`` each, at the sampling temperature, by
        the weights of this version."""
        self.require(version)
        with self.turns.turn(TRAINING):
            found = self.engine.packed_log_probs(packs, temperature=self.run_settings.rollout.temperature)
            return [terms.log_probs.float().cpu().numpy() for terms in found]

    @rpc
    def update(self, shares: Sequence[Share], version: int) -> dict[str, float]:
        """Make the optimizer steps on this rank's shares of a batch, from the weights of this version on.

        Returns:
            means over the tokens of the whole batch, and norms; the same on every rank.
        """
        self.require(version)
        with self.turns.turn(TRAINING):
            reports = self.train(shares, partial(self.loss, normalisers=shares[0].normalisers))
            if self.host_copy is not None:
                self.host_copy.take()
        metrics = dict(common_metrics(reports))
        return {
            **{label: mean_of(reports, name) for name, label in MEANS.items() if name in reports[-1].statistics},
            "policy_loss": metrics.pop("loss"),
            **metrics,
            "trained_tokens": sum(report.statistics.get("tokens", 0.0) for report in reports) / self.settings.epochs,
        }

    def loss(self, model: nn.Module, part: PackedPart, normalisers: Normalisers) -> tuple[Tensor, Mapping[str, Tensor]]:
        """This pack's share of the loss, and shares of statistics; see `TrainingEngine.train_step`."""
        terms = model(packed=part.inputs, temperature=self.run_settings.rollout.temperature)
        return policy_share(terms, part.columns, normalisers, self.run_settings.algorithm)

    @rpc
    def restore(self, step: int) -> None:
        """See `TrainedRole.restore`; then offer the weights."""
        super().restore(step)
        self.offer_weights()

    def offer_weights(self) -> None:
        """Make the weights the source of later pushes."""
        source = self.engine.named_tensors()
        if self.turns.leased:
            with self.turns.turn(TRAINING):
                source = self.host_copy = HostCopy(source)
                self.host_copy.take()
        self.send_weights(source, restored=self.version)

    @rpc
    def export(self, folder: str) -> None:
        """Write the policy as a folder that ``from_pretrained`` reads."""
        with self.turns.turn(TRAINING):
            self.engine.export(Path(folder))
