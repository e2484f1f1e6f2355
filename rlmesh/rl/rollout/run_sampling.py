"""`RunSampling`: buffer, ledger and sampler of a run, as a trainer uses them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh import current_worker
from rlmesh.rl.data.loader import PromptLoader
from rlmesh.rl.rewards.process_pool import PROCESS_DIED
from rlmesh.rl.rollout.buffer import SampleBuffer
from rlmesh.rl.rollout.judging import judge
from rlmesh.rl.rollout.ledger import Ledger
from rlmesh.rl.rollout.requests import Engines
from rlmesh.rl.rollout.role_engines import RoleEngines
from rlmesh.rl.rollout.sampler import POISON, Sampler
from rlmesh.rl.types import Episode, Group, Outcome

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["STATE", "RunSampling", "role_engines"]

logger = logging.getLogger(__name__)

STATE = "buffer.pickle"
"""Name of the buffer's file in the folder of a checkpoint."""
ROWS = 64
"""Responses that an engine samples together, unless its ``max_batch`` says otherwise."""


class RunSampling:
    """The groups of a run, from drawing to training. Its methods are for the thread of the training loop.

    Args:
        run: the settings.
        loader: the prompts.
        engines: the engines.
        score: groups → the same groups with outcomes.
        total: an episode → the outcome of all of its rewards together.
        background: sample while the loop trains.
        revive: gives weights to engines that have none.
        run_dir: for the ledger.

    Attributes:
        buffer: its `state` belongs to a checkpoint.
    """

    def __init__(
        self, run: Run, loader: PromptLoader, engines: Engines, score: Callable[[Sequence[Group]], list[Group]],
        total: Callable[[Episode], Outcome], *, background: bool, revive: Callable[[], object], run_dir: Path,
    ) -> None:  # fmt: skip
        rollout, schedule = run.rollout, run.schedule
        samples = run.algorithm.samples
        self._ledger = Ledger(
            run_dir,
            {
                "pipeline": run.pipeline, "staleness": schedule.staleness, "batch_size": run.batch_size,
                "samples": samples, "prompts": len(loader.data), "seed": run.seed,
            },
            current_worker().clock,
        )  # fmt: skip
        dynamic = rollout.dynamic_sampling
        self.buffer = SampleBuffer(
            run.batch_size, schedule.staleness, run.steps, record=self._ledger.record,
            extra=round(run.batch_size * (rollout.oversampling - 1)), refill=rollout.refill if dynamic else 0.0,
        )  # fmt: skip
        rows = rollout.options.get("max_batch", ROWS)
        self._sampler = Sampler(
            self.buffer, loader.draw, engines, score,
            lambda group: judge(group, total, dynamic=dynamic, died=PROCESS_DIED), pipeline=schedule, samples=samples,
            seed=run.seed, in_flight=rollout.in_flight or max(1, rows // samples), background=background,
            note=self._note, revive=revive,
        )  # fmt: skip
        self.take, self.drain, self.advance = self._sampler.take, self._sampler.drain, self._sampler.advance
        self.trained, self.pause, self.report = self._sampler.trained, self._sampler.pause, self._sampler.report
        self.buffer.deaths, self.buffer.poison = self._ledger.troubles(POISON)
        self._key_of = lambda position: loader.draw(position).key

    def _note(self, text: str) -> None:
        logger.warning(text)
        current_worker().alarm(text)

    def save(self, folder: Path) -> None:
        """Save the buffer with a checkpoint, and make the ledger safe against the death of the machine, later."""
        (folder / STATE).write_bytes(pickle.dumps(self.buffer.state()))
        self._ledger.sync()

    def restore(self, step: int, folder: Path) -> None:
        """Go on after a step: with what was saved then, or else with what the ledger knows.

        Args:
            step: the last step that counts.
            folder: of its checkpoint; need not exist.
        """
        if (folder / STATE).exists():
            state: Mapping[str, Any] = pickle.loads((folder / STATE).read_bytes())
            self._ledger.go_back(step, cursor=state["cursor"], kept=[slot["position"] for slot in state["slots"]])
            self.buffer.restore(state)
            return
        cursor, unfinished = self._ledger.go_back(step)
        least = step * self.buffer.batch_size
        if cursor < least:
            self._note(
                f"the ledger lacks rows of the first {step} steps; the run goes on with the prompt at position {least}"
            )
            cursor = least
        self.buffer.restart(step, cursor, unfinished)

    def finish(self) -> None:
        """Wait until the ledger is written, without fsync: the step counts afterwards."""
        self._ledger.flush()

    def close(self) -> None:
        """End all threads. May be called twice."""
        self._sampler.close()
        self._ledger.close()


def role_engines(run: Run, group: Any, *, in_turn: bool) -> RoleEngines:
    """The engines of a run's role, with the run's parameters of sampling."""
    return RoleEngines(group, run.rollout.params(greedy=False), in_turn=in_turn)
