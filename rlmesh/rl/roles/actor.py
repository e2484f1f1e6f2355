"""`ActorRole`: one rank of the policy in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from rlmesh import SendsWeights, rpc
from rlmesh.rl.algorithms.protocol import Normalisers
from rlmesh.rl.components import policy_share
from rlmesh.rl.engines.training.packed import PackedPart
from rlmesh.rl.engines.training.protocol import Lora
from rlmesh.rl.packing import Pack
from rlmesh.rl.reading.phases import memory_share
from rlmesh.rl.roles.defaults import causal_model
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
    """The weights of the last step, for pushes while the training engine sleeps; ``None`` if it never sleeps."""

    def make_model(self) -> nn.Module:
        # Cross-entropy of given responses alone has no ratio, and no factor from before the step.
        dropout = self.run_settings.algorithm.responses == "given"
        return causal_model(self.run_settings.model, self.device, dropout=dropout)

    @rpc
    def log_probs(self, packs: Sequence[Pack], version: int) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of this rank's packs, ``[targets]`` each, at the sampling temperature.

        Raises:
            SourceRestarted: the weights are not those of ``version``.
        """
        self.require(version)
        with self.turns.turn(TRAINING):
            found = self.engine.packed_log_probs(packs, temperature=self.run_settings.rollout.temperature)
            return [terms.log_probs.float().cpu().numpy() for terms in found]

    @rpc
    def update(self, shares: Sequence[Share], version: int) -> dict[str, float]:
        """Make the optimizer steps on this rank's shares of a batch, beginning with the weights of ``version``.

        Returns:
            means over the tokens of the whole batch, and norms; the same on every rank.

            Raises:
                SourceRestarted: the weights are not those of ``version``.
                ValueError: a pass has several shares, and one lacks the old log-probabilities, which cannot be computed
                    after the first optimizer step.
        """
        self.require(version)
        if len(shares) > 1 and any(each.old_log_probs is None for share in shares for each in share.columns):
            raise ValueError("several optimizer steps in a pass need the old log-probabilities of the whole batch")
        self._first_log_probs: list[Tensor] = []
        with self.turns.turn(TRAINING):
            reports = self.train(shares, partial(self._recorded_loss, shares[0]))
            if self.host_copy is not None:
                self.host_copy.take()
        metrics = dict(common_metrics(reports))
        in_use = memory_share(self.device)
        return {
            **({} if in_use is None else {"memory/actor": in_use}),
            **{label: mean_of(reports, name) for name, label in MEANS.items() if name in reports[-1].statistics},
            "policy_loss": metrics.pop("loss"),
            **metrics,
            "trained_tokens": sum(report.statistics.get("tokens", 0.0) for report in reports) / self.settings.epochs,
        }

    @rpc
    def first_log_probs(self) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of this rank's packs before the last update, ``[targets]`` each. The first
        epoch of the update has kept them."""
        return [each.cpu().numpy() for each in self._first_log_probs]

    def next_share(self, share: Share) -> Share:
        # The ratio of every epoch is relative to the weights before the first epoch.
        if all(each.old_log_probs is not None for each in share.columns):
            return share
        columns = tuple(
            replace(each, old_log_probs=own) for each, own in zip(share.columns, self._first_log_probs, strict=True)
        )
        return replace(share, columns=columns)

    def _recorded_loss(self, share: Share, model: nn.Module, part: PackedPart) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss, and keep the log-probabilities of the pack for `first_log_probs`."""

        def keep(_: nn.Module, args: Any, terms: Any) -> None:
            if len(self._first_log_probs) < len(share.packs):
                self._first_log_probs.append(terms.log_probs.detach().float())

        hook = model.register_forward_hook(keep)
        try:
            return self.loss(model, part, share.normalisers)
        finally:
            hook.remove()

    def loss(self, model: nn.Module, part: PackedPart, normalisers: Normalisers) -> tuple[Tensor, Mapping[str, Tensor]]:
        """This pack's share of the loss, and shares of statistics; see `TrainingEngine.train_step`.

        If the algorithm does not read log-probabilities, ``part.columns.old_log_probs`` is ``None`` in the first epoch.
        The log-probabilities of this pass then are the old ones too, so each ratio is 1.
        """
        terms = model(packed=part.inputs, temperature=self.run_settings.rollout.temperature)
        return policy_share(terms, part.columns, normalisers, self.run_settings.algorithm)

    @property
    def pushed(self) -> Lora | None:
        """The form in which weights are pushed. ``"adapter"``: the adapter alone, for engines of transformers.
        ``"merged"``: all weights with the adapter added, for other engines. None: all weights, without LoRA."""
        if self.settings.lora.rank == 0:
            return None
        return "adapter" if self.run_settings.rollout.engine == "transformers" else "merged"

    @rpc
    def restore(self, step: int) -> None:
        """See `TrainedRole.restore`; then offer the weights."""
        super().restore(step)
        self.offer_weights()

    def offer_weights(self) -> None:
        """Make the weights the source of later pushes."""
        source = self.engine.named_tensors(lora=self.pushed)
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
