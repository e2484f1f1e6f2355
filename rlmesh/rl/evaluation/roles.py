"""The roles of an evaluation: an actor that only holds weights, and a trainer that only validates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlmesh import current_worker, private_files
from rlmesh.rl.data.loader import PromptLoader
from rlmesh.rl.offline.responses import OfflineBuffer
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.trained import TRAINING
from rlmesh.rl.trainers.trainer import Trainer

__all__ = ["EvaluatedActor", "Evaluator"]


class EvaluatedActor(ActorRole):
    """Holds the weights of a model or a checkpoint, and pushes them to the engines; trains nothing."""

    def setup(self) -> None:
        super().setup()
        checkpoint = getattr(self.run_settings, "checkpoint", None)
        if checkpoint is not None:
            with self.turns.turn(TRAINING):
                self.engine.load(Path(checkpoint))
        self.offer_weights()


class Evaluator(Trainer):
    """Validates once."""

    def make_buffer(self, loader: PromptLoader) -> Any:
        return OfflineBuffer(lambda drawn: [], loader)

    def run(self) -> None:
        for role in (self.engines, self.actor) if self.shares else ():
            role.options(idempotent=True).call("release_devices").result()
        self.version = max(self.actor.call("finished_steps").result())
        self.publish()
        metrics = self.validate()
        current_worker().report(step=self.version, **metrics)
        self.hold(None)
        self.weight_sync.close()
        private_files.write_whole(self.run_dir / "evaluation.json", json.dumps(metrics) + "\n")
