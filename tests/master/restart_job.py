"""A job whose members are killed while a trainer works with them; it writes down what it saw."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RestartEvent, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError, Restarting
from rlmesh.job.restarts import Scope


def config() -> dict[str, Any]:
    values: dict[str, Any] = current_worker().job_info.user_config
    return values


class Rollout:
    @rpc
    async def pid(self) -> int:
        return os.getpid()

    @rpc
    async def generate(self, step: int) -> int:
        return step * 10 + current_worker().rank


class Reward:
    """Takes its time to start."""

    def setup(self) -> None:
        time.sleep(config()["setup_s"])
        self.restarted_because = ""
        self.notes: list[str] = []

    def on_restart(self, event: RestartEvent) -> None:
        self.restarted_because = event.cause

    @rpc
    async def pid(self) -> int:
        return os.getpid()

    @rpc
    async def because(self) -> tuple[int, str]:
        return current_worker().incarnation, self.restarted_because

    @rpc(concurrent=64)
    async def score(self, item: int, wait_s: float = 0.0) -> int:
        await asyncio.sleep(wait_s)
        return item * item

    @rpc
    async def count(self, upto: int, wait_s: float = 0.0) -> AsyncIterator[int]:
        for number in range(upto):
            yield number
            await asyncio.sleep(wait_s)

    @rpc
    async def note(self, text: str) -> None:
        self.notes.append(text)

    @rpc
    async def noted(self) -> list[str]:
        return self.notes


class Trainer:
    def run(self) -> None:
        Path(config()["out"]).write_text(json.dumps(getattr(self, config()["scenario"])()))

    def twenty_steps(self) -> dict[str, Any]:
        """Rank 1 of the rewards is killed at step 5 while ten calls to it are on their way, if so configured."""
        rollout, reward = RoleGroup("ROLLOUT"), RoleGroup("REWARD")
        seen: dict[str, Any] = {"pids": [os.getpid(), *rollout.call("pid").result()], "errors": []}
        results = []
        for step in range(20):
            samples = rollout.call("generate", step).result()
            if step == 5 and config()["kill"]:
                seen |= self._kill_under_way(reward)
            began = time.monotonic()
            scores = list(reward.options(idempotent=True).call_batch("score_all", len(samples), samples))
            results.append(sum(scores))
            if step == 5:
                seen["waited_s"] = time.monotonic() - began
            current_worker().report(step)
        seen["results"] = results
        seen["pids_after"] = [os.getpid(), *rollout.call("pid").result()]
        seen["because"] = reward[1].call("because").result()
        seen["reward_0"] = reward[0].call("because").result()[0]
        wait_s = 5.0 if config()["kill"] else 0.0
        seen["phases"] = [(e.role, e.ranks, e.phase) for e in current_worker().events(wait_s)]
        return seen

    def _kill_under_way(self, reward: RoleGroup) -> dict[str, Any]:
        one = reward[1]
        pid = one.call("pid").result()
        idempotent = [one.options(idempotent=True).call("score", item, 0.5) for item in range(5)]
        others = [one.call("score", item, 60.0) for item in range(5)]
        one.call("because").result()  # all of them have begun: methods start in the order of their calls
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        errors = [future.exception() for future in others]
        told_s = time.monotonic() - killed_at
        during = one.call("score", 7)
        sequence = reward.call_batch("score_all", 4, [1, 2, 3, 4])
        any_of = reward.call_any("score", 3)
        impatient = one.options(queue=False).call("score", 1).exception()
        one.notify("note", "sent while it was away")
        return {
            "errors": [[type(e).__name__, e.executed, str(e)] for e in errors if isinstance(e, CallError)],
            "told_s": told_s,
            "any": any_of.result(),
            "any_s": time.monotonic() - killed_at,
            "impatient": isinstance(impatient, Restarting),
            "retried": [future.result() for future in idempotent],
            "during": during.result(),
            "sequence": list(sequence),
            "back_s": time.monotonic() - killed_at,
            "notes": one.call("noted").result(),
        }

    def streams(self) -> dict[str, Any]:
        reward = RoleGroup("REWARD")
        stream = reward[1].stream("count", 1000, 0.01)
        first = next(iter(stream))
        os.kill(reward[1].call("pid").result(), signal.SIGKILL)
        error: CallError | None = None
        try:
            for _ in stream:
                pass
        except CallError as raised:
            error = raised
        return {
            "first": first,
            "error": [type(error).__name__, error.executed] if error is not None else None,
            "again": list(reward[1].stream("count", 3)),
        }

    def listen(self) -> dict[str, Any]:
        """A listener is called at step boundaries while run() runs."""
        heard: list[str] = []
        worker = current_worker()
        worker.on_event(lambda event: heard.append(event.phase))
        reward = RoleGroup("REWARD")
        os.kill(reward[0].call("pid").result(), signal.SIGKILL)
        events = worker.events(wait_s=10.0)
        before = list(heard)
        reward.call("pid").result()
        while "ready" not in heard:
            worker.step_boundary()
            time.sleep(0.005)
        return {"before": before, "heard": heard, "first": [events[0].role, events[0].ranks, events[0].phase]}

    def deadline(self) -> dict[str, Any]:
        """A call to a member that takes longer to come back than the call may last."""
        reward = RoleGroup("REWARD")
        os.kill(reward[0].call("pid").result(), signal.SIGKILL)
        current_worker().events(wait_s=10.0)
        began = time.monotonic()
        error = reward[0].options(timeout_s=0.5).call("score", 1).exception()
        assert isinstance(error, CallError)
        return {"error": [type(error).__name__, error.executed, str(error)], "after_s": time.monotonic() - began}

    def again_and_again(self) -> dict[str, Any]:
        """It is killed as often as it comes back."""
        reward = RoleGroup("REWARD")[0].options(idempotent=True)
        killed: set[int] = set()
        while True:
            pid = reward.call("pid").result()
            if pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)


@rpc(export=True)
def score_all(items: list[int]) -> list[int]:
    return [item * item for item in items]


def build(scenario: str, out: Path, *, kill: bool = True, setup_s: float = 0.0) -> DLJob:
    values = {"scenario": scenario, "out": str(out), "kill": kill, "setup_s": setup_s}
    builder = DLJobBuilder().config(values).device_type("CPU")
    builder.role("ROLLOUT").run(Rollout).total(2).resource(cpu=0)
    builder.role("REWARD").run(Reward).total(2).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()


class Saver:
    """Goes on from its file, and kills itself once on the way."""

    def run(self) -> None:
        path = Path(config()["out"])
        seen = json.loads(path.read_text()) if path.exists() else {"steps": [], "pids": []}
        seen["pids"].append([os.getpid(), *RoleGroup("ROLLOUT").call("pid").result()])
        while (step := len(seen["steps"])) < 4:
            seen["steps"].append(step)
            path.write_text(json.dumps(seen))
            if step == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def build_saver(scope: Scope, out: Path) -> DLJob:
    builder = DLJobBuilder().config({"out": str(out)}).device_type("CPU")
    builder.role("ROLLOUT").run(Rollout).total(2).resource(cpu=0)
    builder.role("TRAINER").run(Saver).resource(cpu=0).restart(scope)
    return builder.build()
