"""A job whose actor is killed: its weights are the number of steps that it made, and with a checkpoint it goes back."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh import (
    ArraySink,
    ArraySource,
    DLJobBuilder,
    ReceivesWeights,
    RestartEvent,
    RoleGroup,
    SendsWeights,
    WeightSync,
    current_worker,
    rpc,
)
from rlmesh.errors import SourceRestarted
from tests.own_time import HANG_S

STEPS, SAVE_EVERY = 5, 2


def config() -> dict[str, Any]:
    values: dict[str, Any] = current_worker().job_info.user_config
    return values


class Actor(SendsWeights):
    def setup(self) -> None:
        self.arrays = {"w": np.zeros(4, dtype=np.float32)}
        self.told: list[int | None] = []
        self.saved = Path(current_worker().run_dir) / "saved.json"
        step = json.loads(self.saved.read_text()) if config()["restores"] and self.saved.exists() else None
        self.arrays["w"] += step or 0
        self.send_weights(ArraySource(self.arrays), restored=step)

    def on_restart(self, event: RestartEvent) -> None:
        self.told.append(event.restored[event.ranks.index(current_worker().rank)])

    @rpc
    def train(self) -> int:
        self.arrays["w"] += 1
        step = int(self.arrays["w"][0])
        if step % SAVE_EVERY == 0:
            self.saved.write_text(json.dumps(step))
        return os.getpid()

    @rpc
    def told_at_restart(self) -> list[int | None]:
        return self.told

    @rpc
    def busy(self, seconds: float) -> None:
        time.sleep(seconds)


class Rollout(ReceivesWeights):
    def setup(self) -> None:
        self.sink = ArraySink({"w": np.zeros(4, dtype=np.float32)})
        self.receive_weights(self.sink)

    @rpc
    def read(self) -> tuple[int, float]:
        with self.weights.serving() as version:
            return version, float(self.sink.arrays["w"][0])


class Trainer:
    def run(self) -> None:
        self.actor, self.rollout = RoleGroup[Any]("ACTOR"), RoleGroup[Any]("ROLLOUT")
        seen = getattr(self, config()["scenario"])()
        Path(config()["out"]).write_text(json.dumps(seen))

    def lost(self) -> dict[str, Any]:
        """The actor dies after step 3. The trainer notices by the error, and goes back if there is a checkpoint."""
        served, error, events, step, died, pid = [], None, list[RestartEvent](), 0, False, 0
        with WeightSync(self.actor, self.rollout) as sync:
            while step < STEPS:
                try:
                    pid = self.actor[0].call("train").result()
                    sync.push(step + 1).result()
                    step += 1
                except SourceRestarted as refused:
                    error = refused
                    at = refused.restored["ACTOR:0"]
                    if at is None:
                        served.append(self.rollout[0].call("read").result())
                        break
                    step = at + 1  # that it was just trained to
                    sync.push(step).result()
                served.append(self.rollout[0].call("read").result())
                if step == 3 and not died:
                    died = True
                    os.kill(pid, signal.SIGKILL)
                    events = self.restart()
        return {
            "served": served,
            "error": [type(error).__name__, str(error)],
            "events": [[event.phase, list(event.restored)] for event in events],
            "on_restart": self.actor[0].call("told_at_restart").result(),
        }

    def restart(self) -> list[RestartEvent]:
        """Until the actor serves again."""
        events: list[RestartEvent] = []
        end = time.monotonic() + HANG_S
        while not any(event.phase == "ready" for event in events):
            assert time.monotonic() < end
            events += current_worker().events(1.0)
        return events

    def busy(self) -> dict[str, Any]:
        """The trainer raises while a rank of the source is busy."""
        began = 0.0
        try:
            with WeightSync(self.actor, self.rollout) as sync:
                sync.push(0).result()
                self.actor[0].call("busy", 3.0)
                time.sleep(0.3)
                began = time.monotonic()
                raise RuntimeError("the trainer gives up")
        except RuntimeError as error:
            return {"left_s": time.monotonic() - began, "error": str(error)}


def build(out: Path, *, scenario: str = "lost", restores: bool = False) -> Any:
    builder = DLJobBuilder().config({"out": str(out), "scenario": scenario, "restores": restores}).device_type("CPU")
    builder.with_restart(max_restarts=10, delay_s=0.0)
    for role, entry in (("ACTOR", Actor), ("ROLLOUT", Rollout), ("TRAINER", Trainer)):
        builder.role(role).run(entry).resource(cpu=0)
    return builder.build()
