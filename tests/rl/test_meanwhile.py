"""The trainer keeps samples and computes metrics while the models train, not before and not after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlmesh.rl.algorithms.protocol import weighed

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from post_training_rlmesh import LocalRun, groups_of
from post_training_samples import SHAPES, build_model, record
from post_training_trl import Settings


class Asked:
    """A call that is carried out when its result is asked for."""

    def __init__(self, events: list[str], method: str, work: Callable[[], Any]) -> None:
        self._events, self._method, self._work = events, method, work
        events.append(f"{method} begins")

    def result(self) -> Any:
        found = self._work().result()
        self._events.append(f"{self._method} ends")
        return found


def test_work_of_the_trainer_is_done_while_the_models_train() -> None:
    torch.set_num_threads(1)
    shape, events = SHAPES["check"], list[str]()
    trainer = LocalRun(build_model(shape), shape.samples, shape.response_tokens, Settings("dapo")).trainer
    role = trainer.actor
    call = role.call
    role.call = lambda method, *args, **options: Asked(events, method, lambda: call(method, *args, **options))

    def meanwhile() -> dict[str, float]:
        events.append("meanwhile")
        return {"own": 3.0}

    packs, batch = trainer.evaluate(groups_of(record(shape, 1)[0]))
    metrics = trainer.train(packs, batch, weighed(trainer.algorithm, batch), meanwhile)
    assert events == ["update begins", "first_log_probs begins", "meanwhile", "update ends", "first_log_probs ends"]
    assert metrics["own"] == 3.0 and "packs/passes" in metrics
