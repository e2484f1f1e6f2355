"""`RunSampling`: buffer, ledger and sampler of a run, in one object for the trainer."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh import WeightSync, current_worker
from rlmesh.rl.checkpoints.changes import sampling_settings
from rlmesh.rl.data.loader import PromptLoader, Prompts
from rlmesh.rl.rewards.process_pool import PROCESS_DIED
from rlmesh.rl.rollout.buffer import SampleBuffer
from rlmesh.rl.rollout.episodes.engines import EpisodeEngines
from rlmesh.rl.rollout.episodes.plan import EpisodePlan
from rlmesh.rl.rollout.judging import judge
from rlmesh.rl.rollout.ledger import Ledger
from rlmesh.rl.rollout.requests import Engines
from rlmesh.rl.rollout.role_engines import RoleEngines
from rlmesh.rl.rollout.sampler import POISON, Sampler
from rlmesh.rl.rollout.saved_groups import plain_group, whole_group
from rlmesh.rl.types import Episode, Group, Outcome

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["RunSampling", "role_engines"]

logger = logging.getLogger(__name__)

SUMMED = 1 << 16
"""Number of prompts in the checksum of a data set; a user's data set may make each prompt on demand."""
ROWS = 64
"""Responses that an engine samples together, if ``rollout.options`` has no ``max_batch``."""


class RunSampling:
    """The groups of a run, from drawing to training. Its methods are for the thread of the training loop.

    Args:
        run: the settings.
        loader: the prompts.
        score: function that returns groups with the outcomes of rewards.
        total: function that gives the combined outcome of an episode's rewards.
        run_dir: the run directory, for the ledger.
    """

    def __init__(
        self, run: Run, loader: PromptLoader, score: Callable[[Sequence[Group]], list[Group]],
        total: Callable[[Episode], Outcome], run_dir: Path,
    ) -> None:  # fmt: skip
        rollout, staleness = run.rollout, run.schedule.staleness
        self._run, self._loader, self._score, self._total = run, loader, score, total
        self._ledger = Ledger(
            run_dir,
            {
                "pipeline": run.pipeline, "staleness": staleness, "batch_size": run.batch_size,
                "samples": run.algorithm.samples, "prompts": len(loader.data), "seed": run.seed,
                "data": sum_of(loader.data),
            },
            current_worker().clock,
        )  # fmt: skip
        self.slots = SampleBuffer(
            run.batch_size, staleness, run.steps, record=self._ledger.record,
            extra=round(run.batch_size * (rollout.oversampling - 1)),
            refill=rollout.refill if rollout.dynamic_sampling else 0.0,
        )  # fmt: skip
        self.slots.deaths, self.slots.poison = self._ledger.troubles(POISON)
        # The ledger does not tell which deaths were crashes.
        self.slots.suspects = {position: -1 - position for position in self.slots.deaths}
        self._sampler: Sampler | None = None
        self._written: Future[None] | None = None
        self._made_by = sampling_settings(run)

    def connect(self, engines: Engines, *, background: bool, revive: Callable[[], object]) -> None:
        """Sample with these engines from now on; has no effect if engines are connected already.

        Args:
            engines: the engines.
            background: sample while the loop trains.
            revive: pushes weights to engines that have none.
        """
        if self._sampler is not None:
            return
        run, samples = self._run, self._run.algorithm.samples
        dynamic, rows = run.rollout.dynamic_sampling, run.rollout.options.get("max_batch", ROWS)
        self._sampler = Sampler(
            self.slots, self._loader.draw, engines, self._score,
            lambda group: judge(group, self._total, dynamic=dynamic, died=PROCESS_DIED), pipeline=run.schedule,
            samples=samples, seed=run.seed, in_flight=run.rollout.in_flight or max(1, rows // samples),
            background=background, deadline_s=run.rollout.deadline_s, note=self._note, revive=revive,
        )  # fmt: skip

    @property
    def sampler(self) -> Sampler:
        """The sampler of the engines that `connect` was given."""
        assert self._sampler is not None, "connect() comes first"
        return self._sampler

    def take(self, step: int) -> list[Group]:
        """The groups of a step, with their rewards; see `Sampler.take`."""
        return self.sampler.take(step)

    def trained(self, step: int) -> None:
        """Free the slots of a step that is trained. If the pipeline drains, first wait until nothing is being sampled,
        so that weights can be pushed."""
        self.sampler.drain()
        self.sampler.trained(step)
        self._written = self._ledger.written()  # `report` waits for it

    def await_idle(self) -> bool:
        """Wait until the engines have nothing to do before the next push; see `Sampler.await_idle`."""
        return self.sampler.await_idle()

    def advance(self, version: int) -> None:
        """Note that all engines serve a version; see `Sampler.advance`."""
        self.sampler.advance(version)

    def pause(self) -> None:
        """Give up all requests, before the run returns to a checkpoint; see `Sampler.pause`."""
        self.sampler.pause()

    def report(self) -> dict[str, float]:
        """The metrics of sampling for a step. The step's rows are in the ledger afterwards, without fsync."""
        self._ledger.flush(self._written)
        return self.sampler.report()

    def _note(self, text: str) -> None:
        logger.warning(text)
        current_worker().alarm(text)

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint between two steps, as plain values: the next position, and the unfinished slots
        with their groups."""
        state = self.slots.state() if self._sampler is None else self._sampler.state()
        for slot in state["slots"]:
            if "group" in slot:
                slot["group"] = plain_group(slot["group"])
        return state | {"made_by": self._made_by}

    def make_durable(self) -> Future[None]:
        """Write the ledger with fsync, in the background; see `Ledger.sync`."""
        return self._ledger.sync()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a state; later rows of the ledger become void.

        Groups that were sampled with other settings are sampled anew: the actor computes log-probabilities at the new
        temperature, and all groups of a batch must have the same rewards.
        """
        slots = [dict(slot) for slot in state["slots"]]
        before = state.get("made_by", self._made_by)
        if other := [name for name in {**before, **self._made_by} if before.get(name) != self._made_by.get(name)]:
            dropped = sum(slot.pop("group", None) is not None for slot in slots)
            logger.warning("%d groups were made before %s changed, and are sampled anew", dropped, ", ".join(other))
        for slot in slots:
            if "group" in slot:
                drawn = self._loader.draw(slot["position"])
                slot["group"] = whole_group(slot["group"], drawn.key, drawn.prompt.row)
        self._ledger.go_back(state["step"] - 1, state["cursor"], [slot["position"] for slot in slots])
        (self._sampler or self.slots).restore({**state, "slots": slots})

    def close(self) -> None:
        """End all threads. May be called twice."""
        if self._sampler is not None:
            self._sampler.close()
        self._ledger.close()


def sum_of(prompts: Prompts) -> int:
    """A checksum of the tokens of the first prompts, at most `SUMMED` of them."""
    found = 0
    for place in range(min(len(prompts), SUMMED)):
        ids = prompts[place].ids
        found = zlib.crc32(ids.tobytes(), zlib.crc32(len(ids).to_bytes(4, "little"), found))
    return found


def role_engines(run: Run, group: Any, *, in_turn: bool, sync: WeightSync | None = None) -> RoleEngines:
    """The engines of a role, with the run's parameters of sampling; see `RoleEngines`."""
    kind = RoleEngines if EpisodePlan.of(run) is None else EpisodeEngines
    return kind(group, run.rollout.params(greedy=False), in_turn=in_turn, sync=sync)
