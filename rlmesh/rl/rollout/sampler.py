"""`Sampler`: requests the groups of a buffer from engines, has them scored, and gives them to the training loop.

With ``background`` a thread does this while the loop trains; otherwise `take` does it on the calling thread. The buffer
has the rules of the order (`rlmesh.rl.rollout.buffer`). The rules for engines are:

* In a pipeline that drains, groups are requested in *rounds*: each engine gets an equal part of the groups in one
  request, and the next round begins when all parts have come and are scored. So responses do not depend on timing. In
  the asynchronous pipeline each group is a request of its own, to the engine with the fewest groups.
* A group whose engine dies is requested again from another engine. The engine that died gets groups once it has
  weights: with the first push after its return, or at once if the training loop waits.
* The groups that an engine was sampling when it crashed are *suspects*: each is sampled alone on an engine. If the
  engine crashes again, its suspect is to blame: the group fails, the run continues, and the other suspects of the first
  crash are cleared. So two crashes find the guilty group. A death from outside (SIGKILL, loss of a node) says less:
  groups become suspects at the second such death, and are to blame at the third. A scorer has its own process, so the
  second death of a group's scorer is enough to blame the group.
* The training loop waits for groups as long as engines sample or rewards answer. If neither happens for ``deadline_s``,
  the wait ends with an error that names the engines or rewards that do not answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlmesh.rl.data.loader import Drawn
from rlmesh.rl.rollout.buffer import GroupSlot, SampleBuffer
from rlmesh.rl.rollout.engine_loads import EngineLoads, RequestEnd
from rlmesh.rl.rollout.pipeline import Pipeline
from rlmesh.rl.rollout.requests import Engines, ErrorKind, GroupRequest, Verdict, sample_seeds
from rlmesh.rl.rollout.silence import Silence
from rlmesh.rl.types import Group

__all__ = ["POISON", "Sampler"]

logger = logging.getLogger(__name__)

POISON = "poison"
"""Beginning of the reason of a group that fails because it kills engines or scorers."""
SCORERS = 4
"""Threads that score groups while others are sampled."""
CLOSE_S, LOOK_S = 10.0, 1.0
"""Seconds that `Sampler.close` waits for its thread, and between two checks of a waiting thread."""
DEADLINE_S, TELL_S = 3600.0, 600.0
"""Seconds without progress after which a wait of the training loop ends with an error, and raises an alarm."""
MISSING = 3
"""The most groups that the text of such an error names."""
SUSPECT_DEATHS, POISON_DEATHS = 2, 3
"""Deaths from outside after which a group becomes a suspect, and after which a suspect is to blame."""


@dataclass(eq=False)
class _Totals:
    """Sums since the last report."""

    trainer_wait_s: float = 0.0
    scoring_wait_s: float = 0.0
    scored_here_s: float = 0.0
    asked_again: int = 0
    dropped: int = 0
    failed: int = 0
    poisoned: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)


class Sampler:
    """Samples the groups of a run with its engines. The training loop's thread calls the public methods.

    Args:
        buffer: the buffer of the run.
        draw: function from a position to the prompt.
        engines: the engines.
        score: function that returns groups with the outcomes of rewards; with ``background``, several threads call it.
        judge: function from a scored group to a verdict.
        pipeline: the pipeline of the run.
        samples: responses per prompt.
        seed: seed of the run.
        in_flight: groups that an engine samples at a time, in a pipeline that does not drain.
        background, deadline_s: sample while the loop trains; see the module.
        note: called with a sentence about each suspect or failed group, and about a long wait.
        revive: pushes weights to engines that have none; called on the loop's thread while it waits for samples.
        clock: returns seconds.
    """

    def __init__(
        self, buffer: SampleBuffer, draw: Callable[[int], Drawn], engines: Engines,
        score: Callable[[Sequence[Group]], list[Group]], judge: Callable[[Group], Verdict], *, pipeline: Pipeline,
        samples: int, seed: int, in_flight: int = 8, background: bool = False, deadline_s: float = DEADLINE_S,
        note: Callable[[str], object] = logger.warning, revive: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.buffer, self.pipeline = buffer, pipeline
        self._draw, self._engines, self._score, self._judge = draw, engines, score, judge
        self._samples, self._seed, self._background, self._deadline_s = samples, seed, background, deadline_s
        self._note, self._revive, self._clock = note, revive, clock
        round_size = buffer.batch_size + buffer.extra if pipeline.drains else 0
        self._loads = EngineLoads(round_size=round_size, in_flight=in_flight)
        self._prompts: dict[int, Drawn] = {}
        self._asked: set[Future[Any]] = set()
        self._scoring: dict[Future[list[Group]], list[GroupSlot]] = {}
        self._silence = Silence(engines.progress, deadline_s, lambda: self._clock())
        self._scorer_deaths: dict[int, int] = {}
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        """Guards the fields of this object and the buffer; notified after events."""
        self._totals = _Totals()
        self._error: BaseException | None = None
        self._generation = 0
        """Number of returns to a checkpoint. Answers to requests of an earlier generation are ignored."""
        self._ends = self._told_of_failure = False
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(SCORERS, thread_name_prefix="rlmesh-scorer") if background else None

    # Called by the training loop.

    def take(self, step: int) -> list[Group]:
        """Wait for the groups of a step, and return them with their rewards, in drawing order.

        Raises:
            TimeoutError: there was no progress for ``deadline_s``; the text names what the loop waits for.
            Exception: an engine or a reward raised an error.
        """
        found: list[GroupSlot] = []

        def there() -> bool:
            renewed = self.buffer.renewed
            found.extend(self.buffer.take(step) or ())
            if self.buffer.renewed != renewed:
                self._post()
            return bool(found)

        self._wait_for_samples(there, f"the groups of step {step}")
        with self._changed:
            self._totals.versions += [slot.versions for slot in found if slot.versions is not None]
        self._post()
        return [slot.group for slot in found if slot.group is not None]

    def drain(self) -> None:
        """In a pipeline that drains, wait until all that these weights may sample is sampled and scored.

        Call this before a push.

        Raises:
            TimeoutError: there was no progress for ``deadline_s``; the text names what the loop waits for.
            Exception: an engine or a reward raised an error.
        """
        if self.pipeline.drains and self._background:
            self._wait_for_samples(self._is_drained, "the end of sampling", revives=False)

    def await_idle(self) -> bool:
        """In a pipeline that drains, wait until the engines have nothing to do before the next push. False if an error,
        a pause or the end of the run comes first. May be called from any thread."""
        with self._changed:
            generation = self._generation
            while self.pipeline.drains and self._background and not self._is_drained():
                if self._ends or self._error is not None or generation != self._generation:
                    return False
                self._changed.wait(LOOK_S)
            return generation == self._generation

    def advance(self, version: int) -> None:
        """Continue to sample: the engines now serve ``version``."""
        with self._changed:
            self._loads.serve(self._engines.ranks())
            self.buffer.advance(version)
        if not self._background:
            # Nothing is sampled while the loop trains, so everything that these weights may sample is sampled now.
            if self.pipeline.staleness:
                self._wait(self._is_drained, "the end of sampling")
            return
        if self._thread is None:
            work = partial(copy_context().run, self._run)
            self._thread = threading.Thread(target=work, name="rlmesh-sampler", daemon=True)
            self._thread.start()
        self._post()

    def trained(self, step: int) -> None:
        """Free the slots of a step."""
        with self._changed:
            for slot in self.buffer.taken:
                self._prompts.pop(slot.position, None)
                self._scorer_deaths.pop(slot.position, None)
            self.buffer.trained(step)

    def pause(self) -> None:
        """Give up all requests, and make none until `advance`: the run returns to a checkpoint."""
        with self._changed:
            self._generation += 1
            self.buffer.version = None
            self._loads.clear()
            self._scoring.clear()
            self._prompts.clear()
            self._scorer_deaths.clear()
            self._error = None
            self._cancel()
            self._changed.notify_all()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of the buffer (`SampleBuffer.restore`). Call `pause` first."""
        with self._changed:
            self._generation += 1
            self._scoring.clear()
            self._error = None
            self.buffer.restore(state)

    def state(self) -> dict[str, Any]:
        """The state of the buffer (`SampleBuffer.state`), also while engines sample. The groups of a round are scored
        together, so those of a round that is not over are left out."""
        with self._changed:
            return self.buffer.state(scored_only=self.pipeline.drains and self._loads.in_round)

    def report(self) -> dict[str, float]:
        """The metrics since the last report, which docs/pipelines.md explains."""
        with self._changed:
            self._measure()
            totals, self._totals = self._totals, _Totals()
            waited_s, busy = self._loads.take_times(self._clock())
            counts, step = self.buffer.counts(), self.buffer.step - 1
        stale = [step - 1 - oldest for oldest, _ in totals.versions]
        mixed = sum(oldest != newest for oldest, newest in totals.versions)
        return {
            "buffer/ready": float(counts["ready"]),
            "buffer/sampling": float(counts["sampling"]),
            "buffer/engines_wait_s": waited_s,
            "buffer/engines_busy": busy,
            "buffer/engines": float(max(len(self._loads), 1)),
            "buffer/trainer_wait_s": totals.trainer_wait_s,
            "buffer/scoring_wait_s": totals.scoring_wait_s,
            "buffer/asked_again": float(totals.asked_again),
            "buffer/dropped": float(totals.dropped),
            "buffer/failed": float(totals.failed),
            "buffer/poisoned": float(totals.poisoned),
            "buffer/staleness_mean": float(np.mean(stale)) if stale else 0.0,
            "buffer/staleness_max": float(max(stale, default=0)),
            "buffer/mixed_versions": mixed / max(len(totals.versions), 1),
        }

    def close(self) -> None:
        """End the threads. Requests are given up, and rewards that hang are not waited for."""
        self._ends = True
        self._post()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        with self._changed:
            self._cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _cancel(self) -> None:
        asked, self._asked = self._asked, set()
        for future in asked:
            future.cancel()

    def _wait_for_samples(self, ready: Callable[[], bool], what: str, *, revives: bool = True) -> None:
        """As `_wait`; measures the time, and the part of it in which only rewards were missing."""
        began = looked = self._clock()
        scoring, scored_s = False, self._totals.scored_here_s

        def measured() -> bool:
            nonlocal looked, scoring
            before, looked = looked, self._clock()
            self._totals.scoring_wait_s += looked - before if scoring else 0.0
            scoring = bool(self._scoring) and (self.buffer.lacks_scores_only or not self._loads.busy)
            return ready()

        self._wait(measured, what, revives=revives)
        with self._changed:
            self._totals.trainer_wait_s += self._clock() - began
            self._totals.scoring_wait_s += self._totals.scored_here_s - scored_s

    def _wait(self, ready: Callable[[], bool], what: str, *, revives: bool = True) -> None:
        told = False
        self._silence.begin()
        while True:
            self._silence.look()
            with self._changed:
                if not self._background:
                    self._go_on()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if ready():
                    return
                silent_s = self._silence.seconds
                if silent_s >= self._deadline_s:
                    raise TimeoutError(self._waits_for(what, self._deadline_s))
                if silent_s >= TELL_S and not told:
                    told = True
                    self._note(self._waits_for(what, TELL_S))
                left_s = min(LOOK_S, (self._deadline_s if told else min(TELL_S, self._deadline_s)) - silent_s)
                lifeless = not self._loads.any_up and bool(self.buffer.askable())
                lacking = revives and (lifeless or self._engines.returned())
                if self._background and not lacking:
                    self._changed.wait(left_s)
                    continue
            if lacking:
                self._revive()
                self._silence.revived()
                with self._changed:
                    self._loads.serve(self._engines.ranks())
                self._post()
            else:
                self._carry_out(left_s)

    # On the sampler's own thread or, without ``background``, on the thread of the training loop.

    def _run(self) -> None:
        while not self._ends:
            try:
                with self._changed:
                    self._go_on()
            except BaseException as error:
                self._give_up(error)
            self._carry_out(LOOK_S)

    def _post(self, event: Callable[[], object] = lambda: None) -> None:
        self._events.put(event)

    def _carry_out(self, wait_s: float) -> None:
        """Carry out all events in the queue; waits up to ``wait_s`` for the first one."""
        try:
            events = [self._events.get(timeout=wait_s)]
        except queue.Empty:
            return
        with self._changed:
            while not self._events.empty():
                events.append(self._events.get())
            for event in events:
                try:
                    event()
                except Exception as error:
                    self._give_up(error)
            self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _go_on(self) -> None:
        """Score sampled groups, draw new slots, and make requests."""
        if self._error is not None or self.buffer.version is None:
            return
        while self._begin_scoring():
            pass
        self.buffer.draw(lambda position: self._prompt(position).key)
        if self.pipeline.staleness == 0 and self.buffer.batch_ready:
            pass  # a push follows: groups that are requested now would be too old for their step
        elif not (self.pipeline.drains and self._scoring):
            for rank, slots in self._loads.plan(self.buffer.askable()):
                self._ask(rank, slots)
        self._measure()

    def _prompt(self, position: int) -> Drawn:
        if position not in self._prompts:
            self._prompts[position] = self._draw(position)
        return self._prompts[position]

    def _is_drained(self) -> bool:
        if self._scoring or self._loads.busy or self.buffer.unscored():
            return False
        return not self._loads.any_up or not (self.buffer.askable() or self.buffer.room)

    def _ask(self, rank: int, slots: list[GroupSlot]) -> None:
        self._measure()
        self._loads.begin(rank, slots, self._clock())
        requests = []
        seeds = sample_seeds(self._seed, [slot.position for slot in slots], self._samples)
        for slot, own in zip(slots, seeds, strict=True):
            self.buffer.ask(slot)
            prompt = self._prompt(slot.position).prompt
            requests.append(GroupRequest(slot.position, prompt.ids.tolist(), own, prompt.row))
        self._measure()  # an engine in this process samples within the call
        try:
            future = self._engines.ask(rank, requests)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._asked.add(future)
        generation = self._generation
        future.add_done_callback(lambda done: self._post(lambda: self._answered(generation, rank, slots, done)))

    def _answered(self, generation: int, rank: int, slots: list[GroupSlot], done: Future[Any]) -> None:
        if generation != self._generation or self._ends:
            if not done.cancelled():
                done.exception()  # the run returned to a checkpoint, so nobody needs it
            return
        self._asked.discard(done)
        self._measure()
        error = done.exception()
        kind = None if error is None else self._engines.kind_of(error)
        ended = self._loads.end(rank, slots, lost=kind in ("crashed", "died", "no weights"))
        if error is None:
            self._silence.answered()
            for slot, episodes in zip(slots, self._engines.episodes(done.result()), strict=True):
                drawn = self._prompt(slot.position)
                self.buffer.sampled(slot, Group(drawn.key, tuple(episodes), drawn.prompt.row))
        elif kind is None or kind == "error":
            self._give_up(error)
        else:
            told = f"engine {rank}, {kind}: {error}"[:200].partition("\n")[0]
            for slot in slots:
                self._lost(slot, kind, ended, told)

    def _lost(self, slot: GroupSlot, kind: ErrorKind, ended: RequestEnd, told: str) -> None:
        """Note that a group must be sampled again, or that it is to blame for the death of its engine."""
        died, crashed = kind != "no weights", kind == "crashed"
        if died:
            self._silence.lost()
        deaths = self.buffer.deaths.get(slot.position, 0) + died
        if died and ended.alone and (crashed or deaths >= POISON_DEATHS):
            slot.deaths += 1
            self._set_aside(slot, f"{deaths} engines died of it, the last one with nothing else: {told}")
            return
        suspect = not slot.suspect and died and (crashed or deaths >= SUSPECT_DEATHS)
        self._totals.asked_again += 1
        self.buffer.ask_again(slot, told, died=died, suspect=ended.death if suspect else 0)

    def _set_aside(self, slot: GroupSlot, why: str) -> None:
        self._totals.poisoned += 1
        self._note(f"{slot.title} fails: {why}")
        self._fail(slot, f"{POISON}: {why}", poison=True)

    def _fail(self, slot: GroupSlot, reason: str, *, poison: bool = False) -> None:
        self._totals.failed += 1
        count, size = self.buffer.fail(slot, reason, poison=poison), self.buffer.batch_size
        if not (poison or self._told_of_failure):
            self._told_of_failure = True
            self._note(f"{slot.title} is left out: {reason}. buffer/failed counts such prompts")
        if count >= size:
            failed = f"{count} groups failed for step {slot.step}, the last one because of: {reason}"
            check = "Check the rewards and the columns of the data that they read"
            self._give_up(RuntimeError(f"no response of the batch has a reward: {failed}. {check}"))

    # Scoring.

    def _begin_scoring(self) -> bool:
        """Give sampled groups to the scorers: each alone or, if the pipeline drains, in rounds. True if they are now
        scored."""
        drains, waits = self.pipeline.drains, self._scoring or self._loads.in_round
        under_way = {slot.position for slots in self._scoring.values() for slot in slots}
        unscored = [] if drains and waits else self.buffer.unscored(in_order=drains and self._loads.any_up)
        slots = [slot for slot in unscored if slot.position not in under_way]
        for part in [slots] if drains and slots else [[slot] for slot in slots]:
            groups = [slot.group for slot in part if slot.group is not None]
            if self._pool is None:
                began = self._clock()
                self._scored(part, self._score(groups))
                self._totals.scored_here_s += self._clock() - began
                continue
            future = self._pool.submit(copy_context().run, self._score, groups)
            self._scoring[future] = part
            future.add_done_callback(lambda done: self._post(lambda: self._finish_scoring(done)))
        return self._pool is None and bool(slots)

    def _finish_scoring(self, done: Future[list[Group]]) -> None:
        slots = self._scoring.pop(done, None)
        if slots is not None:  # otherwise the run returned to a checkpoint meanwhile
            self._scored(slots, done.result())

    def _scored(self, slots: list[GroupSlot], groups: Sequence[Group]) -> None:
        self._silence.answered()
        for slot, group in zip(slots, groups, strict=True):
            verdict = self._judge(group)
            if verdict.state == "died":
                deaths = self._scorer_deaths[slot.position] = self._scorer_deaths.get(slot.position, 0) + 1
                if deaths > 1:
                    self._set_aside(slot, f"its scorer died twice: {verdict.reason}")
                # Otherwise the group is scored again.
            elif verdict.state == "failed":
                self._fail(slot, verdict.reason)
            elif verdict.state == "dropped" and self.buffer.drop(slot, verdict.reason):
                self._totals.dropped += 1
            else:
                self.buffer.scored(slot, group)

    def _measure(self) -> None:
        self._loads.measure(self._clock(), full=self.buffer.version is not None and not self.buffer.askable())

    def _waits_for(self, what: str, silent_s: float) -> str:
        """A sentence about a wait that is too long, which names what the loop waits for."""
        first = [slot for slot in self.buffer if not slot.ready][: self.buffer.batch_size]
        missing = "; ".join(f"position {slot.position} is {slot.state}" for slot in first[:MISSING])
        scoring = sorted(slot.position for slots in self._scoring.values() for slot in slots)
        rewards = f"; rewards score positions {', '.join(map(str, scoring[:MISSING]))}" if scoring else ""
        engines = self._loads.described(self._clock()) or "there is no engine"
        return (
            f"the training waits for {what}, and nothing has come for {silent_s:g} s: "
            f"{missing or 'nothing is missing'}; {engines}{rewards}; groups: {self.buffer.described()}"
        )
