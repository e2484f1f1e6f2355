"""`CriticRole`: one rank of the value function in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from rlmesh import rpc
from rlmesh.rl.components import value_share
from rlmesh.rl.engines.training.packed import PackedPart
from rlmesh.rl.packing import Pack
from rlmesh.rl.roles.trained import TRAINING, Share, TrainedRole, common_metrics, mean_of
from rlmesh.rl.roles.value_head import value_model
from rlmesh.rl.trainers.settings import CriticSettings

__all__ = ["CriticRole"]


class CriticRole(TrainedRole):
    """Estimates the return before each token, and trains on the returns that the algorithm gives.

    Every method is collective: the trainer calls it on all ranks at once. Override `make_model` for a model of your
    own (it takes ``packed=…`` and gives ``[targets]``), or `loss` for another loss.
    """

    section = "critic"
    settings: CriticSettings

    def make_model(self) -> nn.Module:
        return value_model(self.settings.model or self.run_settings.model).to(self.device)

    @rpc
    def values(self, packs: Sequence[Pack], version: int) -> list[NDArray[np.float32]]:
        """The value before each target of this rank's packs, ``[targets]`` each.

        Raises:
            SourceRestarted: the weights are not those of ``version``.
        """
        self.require(version)
        with self.turns.turn(TRAINING):
            return [values.float().cpu().numpy() for values in self.engine.packed_values(packs)]

    @rpc
    def update(self, shares: Sequence[Share], version: int) -> dict[str, float]:
        """Make the optimizer steps on this rank's shares of a batch, beginning with the weights of ``version``.

        Returns:
            means over the tokens of the whole batch, and norms; the same on every rank.

        Raises:
            SourceRestarted: the weights are not those of ``version``.
        """
        self.require(version)
        with self.turns.turn(TRAINING):
            reports = self.train(shares, partial(self.loss, tokens=shares[0].tokens))
        return {
            **{f"critic/{name}": value for name, value in common_metrics(reports).items()},
            "critic/clip_fraction": mean_of(reports, "clipped"),
            "critic/squared_error": mean_of(reports, "error"),
        }

    def loss(self, model: nn.Module, part: PackedPart, tokens: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        """This pack's share of the loss, and shares of statistics; see `TrainingEngine.train_step`."""
        # A user's own algorithm may lack `value_clip`; then values are not clipped.
        clip = getattr(self.run_settings.algorithm, "value_clip", None)
        return value_share(model(packed=part.inputs), part.columns, tokens=tokens, clip=clip)
