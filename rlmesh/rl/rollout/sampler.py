"""`Sampler`: asks the engines for the groups of a buffer, has them scored, and gives them to the training loop.

With ``background`` a thread does that while the loop trains; otherwise `take` does it on the thread that calls it. The
rules are those of the buffer (`rlmesh.rl.rollout.buffer`); here is what concerns engines:

* In a pipeline that drains, groups are asked for in *rounds*: each engine gets an equal part of what may be asked for,
  in one request, and the next round begins when all parts are there and scored. So the responses of a group do not
  depend on times. In the asynchronous pipeline each group is a request of its own, and goes to the engine that has
  fewest, as long as one has fewer than ``in_flight`` groups.
* A group whose engine dies is asked for again, of an engine that lives. Engines that died or have no weights get
  requests again after the next push.
* A group that was being sampled at two deaths is asked for alone: nothing else is on the engine meanwhile. If that
  engine dies too, the group is to blame: it fails, and the run goes on. The same holds for a scorer, which has a process
  to itself, at its second death.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np

from rlmesh.rl.data.loader import Drawn
from rlmesh.rl.rollout.buffer import GroupSlot, SampleBuffer
from rlmesh.rl.rollout.pipeline import Pipeline
from rlmesh.rl.types import Episode, Failed, Group

__all__ = ["Engines", "GroupRequest", "Sampler", "Verdict", "sample_seed"]

logger = logging.getLogger(__name__)

TOGETHER_DEATHS = 2
"""After so many deaths of engines that were sampling a group, it is asked for alone."""
SCORERS = 4
"""Threads that have groups scored while others are sampled."""
LOOK_S = 1.0
"""Seconds between two looks at engines that may have joined, if nothing else happens."""

Kind = Literal["died", "no weights", "error"]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for the responses of one group.

    Attributes:
        position: of the group's slot.
        prompt: token ids.
        seeds: of each response; they depend on the run's seed and the position only.
    """

    position: int
    prompt: list[int]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a scored group.

    Attributes:
        state: ``kept``; ``dropped``: it teaches nothing; ``failed``: it has no reward; ``died``: a scorer's process died.
        reason: for people.
    """

    state: Literal["kept", "dropped", "failed", "died"]
    reason: str = ""


class Engines(Protocol):
    """The engines, as a sampler sees them."""

    def ranks(self) -> Sequence[int]:
        """The ranks of all engines, whether or not they live."""
        ...

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[list[list[Episode]]]:
        """Start to sample; the future has the episodes of each request."""
        ...

    def kind_of(self, error: BaseException) -> Kind:
        """What an error of `ask` means: the engine's process died, it has no weights, or anything else."""
        ...


def sample_seed(seed: int, position: int, sample: int) -> int:
    """The seed of one response, from 0 to 2³¹ − 1, which the run's seed, the position and its number determine."""
    return int(np.random.SeedSequence([seed, position, sample]).generate_state(1)[0]) >> 1


@dataclass(eq=False)
class _Engine:
    """An engine: the slots that it samples, and whether it may be asked."""

    up: bool = True
    alone: bool = False
    busy: dict[int, GroupSlot] = field(default_factory=dict)
    idle_since: float | None = None


@dataclass(eq=False)
class _Totals:
    """Sums since the last report."""

    engines_wait_s: float = 0.0
    trainer_wait_s: float = 0.0
    asked_again: int = 0
    dropped: int = 0
    failed: int = 0
    poisoned: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)


class Sampler:
    """Its public methods are for the one thread of the training loop.

    Args:
        buffer: of the run.
        draw: position → the prompt.
        engines: the engines.
        score: the groups → the same groups with the outcomes of their rewards. With ``background`` it is called on
            several threads.
        judge: a scored group → what becomes of it.
        pipeline: of the run.
        samples: responses per prompt.
        seed: of the run.
        in_flight: groups that one engine samples at a time, in a pipeline that does not drain.
        background: sample while the loop trains.
        note: called with a sentence about each group that is set aside.
        revive: gives weights to engines that have none; called on the loop's thread when no engine is left.
    """

    def __init__(
        self, buffer: SampleBuffer, draw: Callable[[int], Drawn], engines: Engines,
        score: Callable[[Sequence[Group]], list[Group]], judge: Callable[[Group], Verdict], *, pipeline: Pipeline,
        samples: int, seed: int, in_flight: int = 8, background: bool = False,
        note: Callable[[str], object] = logger.warning, revive: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.buffer, self.pipeline = buffer, pipeline
        self._draw, self._engines, self._score, self._judge = draw, engines, score, judge
        self._samples, self._seed, self._in_flight = samples, seed, in_flight
        self._note, self._revive, self._clock = note, revive, clock
        self._prompts: dict[int, Drawn] = {}
        self._known: dict[int, _Engine] = {}
        self._scoring: dict[Future[list[Group]], list[GroupSlot]] = {}
        self._scorer_deaths: dict[int, int] = {}
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.RLock()
        """Guards all fields of this object and the buffer."""
        self._changed = threading.Condition(self._lock)
        self._totals = _Totals()
        self._error: BaseException | None = None
        self._generation = 0
        """Answers of an earlier generation came after the run went back, and are ignored."""
        self._background = background
        self._ends = False
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(SCORERS, thread_name_prefix="rlmesh-scorer") if background else None

    # For the training loop.

    def take(self, step: int, timeout_s: float | None = None) -> list[Group]:
        """The groups of a step, with their rewards, in drawing order; waits for them.

        Raises:
            TimeoutError: they are not there after ``timeout_s``.
            Exception: an engine or a reward raised an error.
        """
        began = self._clock()
        found: list[GroupSlot] | None = None

        def there() -> bool:
            nonlocal found
            found = self.buffer.take(step)
            return found is not None

        self._wait(there, timeout_s, lambda: f"step {step} has no groups: {self._described()}")
        assert found is not None
        with self._lock:
            self._totals.trainer_wait_s += self._clock() - began
            self._totals.taken += [slot.versions for slot in found if slot.versions is not None]
        self._post(lambda: None)
        return [slot.group for slot in found if slot.group is not None]

    def drain(self, timeout_s: float | None = None) -> None:
        """In a pipeline that drains, wait until nothing is being sampled or scored, and nothing more can be with these
        weights. Call it before a push."""
        if not self.pipeline.drains or not self._background:
            return
        self._wait(self._is_drained, timeout_s, lambda: f"engines still sample: {self._described()}", revives=False)

    def advance(self, version: int) -> None:
        """All engines serve a version; sample on."""
        with self._lock:
            for rank in self._engines.ranks():
                self._engine(rank).up = True
            self.buffer.advance(version)
        if self._background and self._thread is None:
            work = partial(copy_context().run, self._run)
            self._thread = threading.Thread(target=work, name="rlmesh-sampler", daemon=True)
            self._thread.start()
        self._post(lambda: None)

    def trained(self, step: int) -> None:
        """Free the slots of a step."""
        with self._lock:
            for slot in self.buffer.taken:
                self._prompts.pop(slot.position, None)
            self.buffer.trained(step)

    def pause(self) -> None:
        """Ask for nothing more, and ignore what is still being sampled: the run goes back to a checkpoint."""
        with self._lock:
            self._generation += 1
            self.buffer.version = None
            self._known.clear()
            self._scoring.clear()
            self._prompts.clear()
            self._scorer_deaths.clear()
            self._error = None

    def report(self) -> dict[str, float]:
        """Numbers for the report of a step, since the last report."""
        with self._lock:
            self._measure()
            totals, self._totals = self._totals, _Totals()
            counts, step = self.buffer.counts(), self.buffer.step - 1
            engines = max(len(self._known), 1)
        stale = [step - 1 - oldest for oldest, _ in totals.taken]
        mixed = sum(oldest != newest for oldest, newest in totals.taken)
        return {
            "buffer/ready": float(counts["ready"]),
            "buffer/sampling": float(counts["sampling"]),
            "buffer/engines_wait_s": totals.engines_wait_s / engines,
            "buffer/trainer_wait_s": totals.trainer_wait_s,
            "buffer/asked_again": float(totals.asked_again),
            "buffer/dropped": float(totals.dropped),
            "buffer/failed": float(totals.failed),
            "buffer/poisoned": float(totals.poisoned),
            "buffer/staleness_mean": float(np.mean(stale)) if stale else 0.0,
            "buffer/staleness_max": float(max(stale, default=0)),
            "buffer/mixed_versions": mixed / max(len(totals.taken), 1),
        }

    def close(self) -> None:
        """End the threads. What is being sampled is given up."""
        self._ends = True
        self._post(lambda: None)
        if self._thread is not None:
            self._thread.join()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _wait(
        self, ready: Callable[[], bool], timeout_s: float | None, why: Callable[[], str], *, revives: bool = True
    ) -> None:
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while True:
            with self._lock:
                if not self._background:
                    self._go_on()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if ready():
                    return
                lifeless = revives and not self._any_up() and bool(self.buffer.askable())
            if lifeless:
                self._revive()
                self.advance(self.buffer.version or 0)
                continue
            left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - self._clock())
            if left_s <= 0:
                with self._lock:
                    raise TimeoutError(why())
            if self._background:
                with self._lock:
                    self._changed.wait_for(lambda: self._error is not None or ready(), 0) or self._changed.wait(left_s)
            else:
                self._carry_out(left_s)

    # On the thread of the sampler; without one, on that of the training loop.

    def _run(self) -> None:
        while not self._ends:
            try:
                with self._lock:
                    self._go_on()
            except BaseException as error:
                self._give_up(error)
            self._carry_out(LOOK_S)

    def _carry_out(self, wait_s: float) -> None:
        """Carry out the next events, all that are there; waits for the first."""
        try:
            work = self._events.get(timeout=wait_s)
        except queue.Empty:
            return
        with self._lock:
            work()
            while not self._events.empty():
                self._events.get()()
            self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._changed.notify_all()

    def _post(self, event: Callable[[], object]) -> None:
        self._events.put(event)

    def _go_on(self) -> None:
        """Score what is sampled, draw, and ask engines."""
        self._begin_scoring()
        self.buffer.draw(self._key_of)
        waiting = self.buffer.askable()
        in_round = self.pipeline.drains and (self._scoring or any(engine.busy for engine in self._known.values()))
        if waiting and not (in_round and not any(slot.asked for slot in waiting)):
            self._ask_engines([slot for slot in waiting if slot.asked] if in_round else waiting)
        self._measure()
        self._changed.notify_all()

    def _key_of(self, position: int) -> tuple[int, int]:
        return self._prompt(position).key

    def _prompt(self, position: int) -> Drawn:
        if position not in self._prompts:
            self._prompts[position] = self._draw(position)
        return self._prompts[position]

    def _engine(self, rank: int) -> _Engine:
        return self._known.setdefault(rank, _Engine())

    def _any_up(self) -> bool:
        return any(engine.up for engine in self._known.values())

    def _is_drained(self) -> bool:
        if self._scoring or any(engine.busy for engine in self._known.values()):
            return False
        if any(slot.state == "sampled" and not slot.scored for slot in self.buffer):
            return False
        return not self._any_up() or not (self.buffer.askable() or self.buffer.window > len(self.buffer.waiting))

    def _ask_engines(self, waiting: list[GroupSlot]) -> None:
        up = {rank: engine for rank, engine in sorted(self._known.items()) if engine.up and not engine.alone}
        free = [rank for rank, engine in up.items() if not engine.busy]
        suspects = [slot for slot in waiting if slot.deaths >= TOGETHER_DEATHS]
        for slot in suspects[: len(free)]:
            rank = free.pop()
            self._known[rank].alone = True
            self._ask(rank, [slot])
            up.pop(rank)
        others = [slot for slot in waiting if slot.deaths < TOGETHER_DEATHS]
        if suspects and up and len(suspects) > len(free):
            up.pop(next(iter(up)))  # one engine gets no more groups, so that it becomes free for the suspects
        if self.pipeline.drains:
            # Parts that are asked for again keep their size, so that their responses stay the same.
            free = [rank for rank in up if not up[rank].busy]
            for number, rank in enumerate(free):
                part = others[len(others) * number // len(free) : len(others) * (number + 1) // len(free)]
                if part:
                    self._ask(rank, part)
            return
        for slot in others:
            rank = min(up, key=lambda one: len(up[one].busy), default=-1)
            if rank < 0 or len(up[rank].busy) >= self._in_flight:
                break
            self._ask(rank, [slot])

    def _ask(self, rank: int, slots: Sequence[GroupSlot]) -> None:
        engine, generation = self._engine(rank), self._generation
        requests = []
        for slot in slots:
            engine.busy[slot.position] = slot
            self.buffer.ask(slot)
            seeds = tuple(sample_seed(self._seed, slot.position, sample) for sample in range(self._samples))
            requests.append(GroupRequest(slot.position, self._prompt(slot.position).prompt.ids.tolist(), seeds))
        self._measure()
        try:
            future = self._engines.ask(rank, requests)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._post(lambda: self._answered(generation, rank, list(slots), done)))

    def _answered(self, generation: int, rank: int, slots: list[GroupSlot], done: Future[list[list[Episode]]]) -> None:
        if generation != self._generation:
            done.exception()
            return
        engine = self._engine(rank)
        self._measure()
        for slot in slots:
            engine.busy.pop(slot.position, None)
        alone, engine.alone = engine.alone, False
        error = done.exception()
        if error is None:
            for slot, episodes in zip(slots, done.result(), strict=True):
                drawn = self._prompt(slot.position)
                self.buffer.sampled(slot, Group(drawn.key, tuple(episodes), drawn.prompt.row))
            return
        kind = self._engines.kind_of(error)
        if kind == "error":
            self._give_up(error)
            return
        engine.up = False
        for slot in slots:
            if alone and kind == "died":
                self._set_aside(
                    slot, f"its engine died {slot.deaths + 1} times, the last time with nothing else: {error}"
                )
                continue
            self._totals.asked_again += 1
            self.buffer.ask_again(slot, f"engine {rank}: {kind}: {error!s:.200}", died=kind == "died")

    def _set_aside(self, slot: GroupSlot, why: str) -> None:
        self._totals.poisoned += 1
        self._fail(slot, f"poison: {why}")
        self._note(
            f"the prompt at position {slot.position} (epoch {slot.key[0]}, prompt {slot.key[1]} of the data) is set "
            f"aside: {why}"
        )

    def _fail(self, slot: GroupSlot, reason: str) -> None:
        self._totals.failed += 1
        group = slot.group
        if self.buffer.fail(slot, reason) >= self.buffer.batch_size:
            said = group.episodes[0].outcomes if group is not None else reason
            self._give_up(
                RuntimeError(
                    f"no response of the batch has a reward: {self.buffer.batch_size} groups failed for step "
                    f"{slot.step}, and {said} was said of the last. Check the rewards and the columns of the data that "
                    "they read"
                )
            )

    # Scoring.

    def _begin_scoring(self) -> None:
        """Give groups that are sampled to the rewards: each by itself, or, in a pipeline that drains, a whole round."""
        under_way = {slot.position for slots in self._scoring.values() for slot in slots}
        slots = [
            slot
            for slot in self.buffer
            if slot.state == "sampled" and not slot.scored and slot.position not in under_way
        ]
        if self.pipeline.drains:
            if slots and not self._scoring and not any(engine.busy for engine in self._known.values()):
                if not self._any_up() or not any(slot.asked for slot in self.buffer.askable()):
                    self._score_together(slots)
            return
        for slot in slots:
            self._score_together([slot])

    def _score_together(self, slots: list[GroupSlot]) -> None:
        groups = [slot.group for slot in slots if slot.group is not None]
        generation = self._generation
        if self._pool is None:
            # The lock is this thread's own, and nobody else waits for it.
            self._scored(generation, slots, self._score(groups))
            return
        future = self._pool.submit(copy_context().run, self._score, groups)
        self._scoring[future] = slots

        def finish(done: Future[list[Group]]) -> None:
            self._post(lambda: self._finish_scoring(generation, done))

        future.add_done_callback(finish)

    def _finish_scoring(self, generation: int, done: Future[list[Group]]) -> None:
        if generation != self._generation or done.cancelled():
            return
        slots = self._scoring.pop(done)
        if (error := done.exception()) is not None:
            self._give_up(error)
            return
        self._scored(generation, slots, done.result())

    def _scored(self, generation: int, slots: list[GroupSlot], groups: Sequence[Group]) -> None:
        for slot, group in zip(slots, groups, strict=True):
            verdict = self._judge(group)
            if verdict.state == "died":
                deaths = self._scorer_deaths[slot.position] = self._scorer_deaths.get(slot.position, 0) + 1
                if deaths > 1:
                    self._set_aside(slot, f"its scorer died twice: {verdict.reason}")
                continue  # else it is scored again
            if verdict.state == "failed":
                self.buffer.scored(slot, group)
                self._fail(slot, verdict.reason)
            elif verdict.state == "dropped" and self.buffer.drop(slot, verdict.reason):
                self._totals.dropped += 1
            else:
                self.buffer.scored(slot, group)

    # Measuring.

    def _measure(self) -> None:
        """Add up the time for which engines have had nothing to sample because the buffer is full."""
        now = self._clock()
        full = self.buffer.version is not None and not self.buffer.askable()
        for engine in self._known.values():
            if engine.idle_since is not None:
                self._totals.engines_wait_s += now - engine.idle_since
            engine.idle_since = now if full and engine.up and not engine.busy else None

    def _described(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.buffer.counts().items())
        engines = ", ".join(
            f"engine {rank} {'samples ' + str(len(one.busy)) if one.up else 'is down'}"
            for rank, one in sorted(self._known.items())
        )
        return f"{counts}; {engines or 'there are no engines'}"


def died_scorer(group: Group, sign: str) -> str:
    """The reason of an outcome that a dead scorer left, or an empty text.

    Args:
        sign: the text by which such reasons are known.
    """
    for episode in group.episodes:
        for outcome in episode.outcomes.values():
            if isinstance(outcome, Failed) and sign in outcome.reason:
                return outcome.reason
    return ""
