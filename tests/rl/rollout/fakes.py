"""Engines without models, for tests of the sampler: they answer after a time that the test gives, and die on demand."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmesh.errors import PeerLost, WeightsNotReady
from rlmesh.rl.data.dataset import Prompt
from rlmesh.rl.data.loader import Drawn, order
from rlmesh.rl.rollout.requests import ErrorKind, GroupRequest
from rlmesh.rl.rollout.role_engines import kind_of
from rlmesh.rl.types import Episode, Group, Score, Turn

__all__ = ["FakeEngines", "draw_from", "group_of", "scored"]


def group_of(position: int, version: int, *, samples: int = 2, newest: int | None = None) -> Group:
    """A group without rewards, of two tokens per response."""
    spans = ((version, 0, 2),) if newest is None else ((version, 0, 1), (newest, 1, 2))
    turn = Turn(np.array([position, version], np.int32), "policy", np.zeros(2, np.float32), version_spans=spans)
    episodes = tuple(Episode((Turn.said([1]), turn)) for _ in range(samples))
    return Group((0, position), episodes)


def draw_from(prompts: int) -> Callable[[int], Drawn]:
    """Position → prompt, in the order of a run with seed 0."""

    def draw(position: int) -> Drawn:
        epoch, place = divmod(position, prompts)
        index = int(order(0, epoch, prompts)[place])
        return Drawn((epoch, index), Prompt(np.array([index + 2], np.int32), {"index": index}, index))

    return draw


def scored(groups: Sequence[Group], value: Callable[[Group, int], float] = lambda group, number: number) -> list[Group]:
    """The groups with a reward for each response."""
    return [
        Group(
            group.key,
            tuple(
                Episode(one.turns, outcomes={"r": Score(float(value(group, number)))})
                for number, one in enumerate(group.episodes)
            ),
            group.row,
        )
        for group in groups
    ]


@dataclass(order=True)
class _Answer:
    due: float
    number: int
    positions: tuple[int, ...] = field(compare=False)
    act: Any = field(compare=False)


class FakeEngines:
    """Engines on a thread of their own, with a clock that jumps to the next answer.

    Args:
        count: engines.
        time_of: position → seconds of the answer, of which none really passes.
        kills: position → True if its request kills the engine.
        outside: position → True if the engine is killed from outside while it samples it.
    """

    def __init__(
        self, count: int, time_of: Callable[[int], float] = lambda position: 1.0,
        kills: Callable[[int], bool] = lambda position: False,
        outside: Callable[[int], bool] = lambda position: False,
    ) -> None:  # fmt: skip
        self.count, self.time_of, self.kills, self.outside = count, time_of, kills, outside
        self.now, self.version = 0.0, 0
        self.dead: set[int] = set()
        self.asked: list[tuple[int, int, tuple[int, ...]]] = []
        """(engine, version, positions) of each request."""
        self.stuck: set[int] = set()
        """Positions whose answers do not come before they are taken out of this set."""
        self.absent: set[int] = set()
        """Engines that the last push left out, since they restart."""
        self.back = False
        """What `returned` says."""
        self.tokens: Sequence[int] = ()
        """What `progress` says of the engines."""
        self._answers: list[_Answer] = []
        self._numbers = itertools.count()
        self._running: dict[int, list[Future[Any]]] = {}
        self._changed = threading.Condition()
        self._held = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def push(self, version: int) -> None:
        """All engines that are there live and serve a version."""
        with self._changed:
            if self.back:
                self.back, self.absent = False, set()
            self.version = version
            self.dead &= self.absent

    def kill(self, rank: int, how: str = "killed by SIGKILL") -> None:
        """The engine dies with all that it samples."""
        with self._changed:
            self.dead.add(rank)
            futures = self._running.pop(rank, [])
        for future in futures:
            if not future.done():
                error = PeerLost(f"ROLLOUT:{rank} died")
                error.reason = f"ROLLOUT rank {rank} (pid 1) {how}; its last lines:\n    killed by SIGSEGV"
                future.set_exception(error)

    def hold(self) -> None:
        """No time passes until `go_on`."""
        with self._changed:
            self._held += 1

    def go_on(self) -> None:
        with self._changed:
            self._held -= 1
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()

    def ranks(self) -> Sequence[int]:
        return [rank for rank in range(self.count) if rank not in self.absent]

    def returned(self) -> bool:
        return self.back

    def ask(self, rank: int, requests: Sequence[GroupRequest]) -> Future[Any]:
        future: Future[Any] = Future()
        positions = tuple(request.position for request in requests)
        with self._changed:
            self.asked.append((rank, self.version, positions))
            if rank in self.dead:
                future.set_exception(WeightsNotReady(f"ROLLOUT:{rank} has restarted"))
                return future
            self._running.setdefault(rank, []).append(future)
            version = self.version

            def act() -> None:
                if future.done():
                    return
                if any(map(self.kills, positions)):
                    self.kill(rank, "killed by SIGSEGV")
                    return
                if any(map(self.outside, positions)):
                    self.kill(rank)
                    return
                newest = None if self.version == version else self.version
                groups = [group_of(one.position, version, samples=len(one.seeds), newest=newest) for one in requests]
                future.set_result([list(group.episodes) for group in groups])

            due = self.now + max(map(self.time_of, positions))
            self._answers.append(_Answer(due, next(self._numbers), positions, act))
            self._changed.notify()
        return future

    def episodes(self, result: Any) -> list[list[Episode]]:
        found: list[list[Episode]] = result
        return found

    def progress(self) -> dict[int, int]:
        return dict(enumerate(self.tokens))

    def kind_of(self, error: BaseException) -> ErrorKind:
        return kind_of(error)

    def release(self) -> None:
        """No answer is stuck any longer."""
        with self._changed:
            self.stuck.clear()
            self._changed.notify()

    def _next(self) -> _Answer | None:
        return min((one for one in self._answers if not self.stuck.intersection(one.positions)), default=None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or (self._next() is not None and not self._held))
                if self._ends:
                    return
                answer = self._next()
                assert answer is not None
                self._answers.remove(answer)
                self.now = max(self.now, answer.due)
            answer.act()
