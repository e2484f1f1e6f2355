"""A job that syncs weights while its receivers are killed; its trainer writes down what it saw.

Every element of version v is v, so that a torn version shows itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh import (
    ArraySink,
    ArraySource,
    DLJobBuilder,
    ReceivesWeights,
    RoleGroup,
    SendsWeights,
    WeightSync,
    current_worker,
    rpc,
)
from rlmesh.errors import WeightsNotReady, WeightSyncError

BUCKETS = 20
ITEMS = 4096
# All that a sink's tap is told of in one push; after "staged" the bucket has arrived, but nobody was told of it.
POINTS = [(step, bucket) for step in ("stage", "staged") for bucket in range(BUCKETS)] + [("flip", -1)]


def config() -> dict[str, Any]:
    values: dict[str, Any] = current_worker().job_info.user_config
    return values


def blank() -> dict[str, Any]:
    return {f"layer.{i}": np.zeros(ITEMS, np.float32) for i in range(BUCKETS)}


class Actor(SendsWeights):
    def setup(self) -> None:
        self.arrays = blank()
        self.send_weights(ArraySource(self.arrays))

    @rpc
    def train(self, version: int) -> None:
        for array in self.arrays.values():
            array[...] = version

    @rpc
    def resident_bytes(self) -> int:
        return resident_bytes()

    @rpc
    def pid(self) -> int:
        return os.getpid()

    @rpc
    def push_from_here(self, version: int) -> list[Any]:
        """As its own coordinator: from a source of its own, and from its role, which it must not wait for."""
        self.train(version)
        rollout = RoleGroup[Any]("ROLLOUT")
        with WeightSync(ArraySource(self.arrays), rollout, channel=config()["channel"]) as sync:
            served = sync.push(version).result().version
        with WeightSync(RoleGroup[Any]("ACTOR"), rollout) as sync:
            try:
                sync.push(version + 1)
            except Exception as error:
                return [served, type(error).__name__, str(error)]
        return [served, "", ""]


class Rollout(ReceivesWeights):
    def setup(self) -> None:
        self.die_at: tuple[str, int] | None = None
        keep = bool(config().get("keep", True))
        self.sink = ArraySink(blank(), config()["mode"], keep_shared=keep)
        self.receive_weights(self.sink, tap=self.tap)

    def tap(self, step: str, bucket: int) -> None:
        if (step, bucket) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @rpc
    async def arm(self, bucket: int, step: str = "stage") -> None:
        self.die_at = step, bucket

    @rpc
    def pid(self) -> int:
        return os.getpid()

    @rpc
    def sample(self) -> list[float] | None:
        """The version that is said to be served, and all values that are; None: refused."""
        try:
            with self.weights.serving(5) as version:
                return [version, *np.unique(np.concatenate(list(self.sink.arrays.values()))).tolist()]
        except WeightsNotReady:
            return None

    @rpc
    def resident_bytes(self) -> int:
        return resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def caught(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def shared_bytes() -> int:
    return sum(path.stat().st_size for path in Path("/dev/shm").glob(f"rlmesh-{current_worker().job_info.job_id}-*"))


class Trainer:
    def run(self) -> None:
        self.actor, self.rollout = RoleGroup[Any]("ACTOR"), RoleGroup[Any]("ROLLOUT")
        self.sync = WeightSync(self.actor, self.rollout, channel=config()["channel"], bucket_bytes=4 * ITEMS)
        seen = getattr(self, config()["scenario"])()
        self.sync.close()
        Path(config()["out"]).write_text(json.dumps(seen))

    def push(self, version: int) -> None:
        self.actor.call("train", version).result()
        self.sync.push(version).result()

    def one_kill(self) -> dict[str, Any]:
        """Rank 1 is killed in bucket 7 of the second push."""
        self.push(1)
        first = self.rollout.call("sample").result()
        self.rollout[1].call("arm", 7).result()
        self.actor.call("train", 2).result()
        began = time.monotonic()
        error = self.sync.push(2).exception()
        assert isinstance(error, WeightSyncError)
        after_s = time.monotonic() - began
        left = self.rollout[0].call("sample").result()
        shared = shared_bytes()
        reborn = self.rollout[1].call("sample").result()
        self.push(3)
        return {
            "first": first,
            "error": [str(error), error.version, error.receiver, error.bucket],
            "after_s": after_s,
            "left": left,
            "shared": shared,
            "reborn": reborn,
            "last": self.rollout.call("sample").result(),
            "plan": str(self.sync.plan()),
        }

    def together(self) -> dict[str, Any]:
        """Source and sinks are fused: each pair has one process and one main thread."""
        pids = self.actor.call("pid").result(), self.rollout.call("pid").result()
        samples = []
        for version in (1, 2, 3):
            self.push(version)
            samples.append(self.rollout.call("sample").result())
        self.actor.call("train", 9).result()
        still = self.rollout.call("sample").result()
        with WeightSync(self.actor, self.rollout, snapshot=True, channel=config()["channel"]) as sync:
            pushing = sync.push(9)
            self.actor.call("train", 10).result()
            pushing.result()
        copied = self.rollout.call("sample").result()
        own = self.actor[0].call("push_from_here", 20).result()
        served = self.rollout.call("sample").result()
        self.rollout[1].call("arm", 7).result()
        self.actor.call("train", 21).result()
        error = self.sync.push(21).exception()
        after_kill = self.rollout.call("sample").result()
        self.actor.call("train", 22).result()
        refused = caught(lambda: self.sync.push(22))
        self.sync.source_restored(22)
        self.sync.push(22).result()
        last = self.rollout.call("sample").result()
        return {
            "pids": pids, "samples": samples, "still": still, "copied": copied, "own": own, "served": served,
            "error": str(error), "refused": [type(refused).__name__, str(refused)], "after_kill": after_kill,
            "last": last, "plan": str(self.sync.plan()),
        }  # fmt: skip

    def alone(self) -> dict[str, Any]:
        """All three roles are fused: whoever pushes is in the process, too."""
        samples = []
        for version in (1, 2, 3):
            self.push(version)
            samples.append(self.rollout.call("sample").result())
        return {"samples": samples, "pids": [os.getpid(), *self.rollout.call("pid").result()]}

    def many(self) -> dict[str, Any]:
        """Many pushes, some of which a receiver does not survive: killed anywhere, or everywhere in turn."""
        generator = random.Random(0)
        committed: set[float] = set()
        served: float | None = None
        kills, faults, levels = 0, [], []
        for version in range(1, config()["pushes"] + 1):
            self.actor.call("train", version).result()
            victim = generator.randrange(2)
            kill = version % config()["kill_every"] == 0
            step, bucket = POINTS[kills % len(POINTS)] if config().get("in_turn") else generator.choice(POINTS)
            if kill:
                self.rollout[victim].call("arm", bucket, step).result()
            error = self.sync.push(version).exception()
            kills += kill
            if (error is not None) != kill or (kill and f"receiver ROLLOUT:{victim} failed" not in str(error)):
                faults.append(f"version {version}, killed at {(step, bucket) if kill else None}: {error}")
            if error is None:
                committed.add(version)
                served = version
            for rank, sample in enumerate(self.rollout.call("sample").result()):
                fresh = (kill and rank == victim) or (error is not None and config()["mode"] == "in_place")
                wanted = None if fresh else [served, served]
                if sample != wanted or (sample is not None and sample[0] not in committed):
                    faults.append(f"version {version}: rank {rank} gave {sample}, not {wanted}")
            if version % (config()["pushes"] // 5) == 0:
                resident = [*self.actor.call("resident_bytes").result(), resident_bytes()]
                levels.append([shared_bytes(), *resident])
        return {"kills": kills, "faults": faults[:10], "levels": levels}


def build(
    out: Path, scenario: str, *, channel: str = "auto", mode: str = "double_buffer", fused: int = 0, **more: Any
) -> Any:
    values = {"out": str(out), "scenario": scenario, "channel": channel, "mode": mode, **more}
    builder = DLJobBuilder().config(values).device_type("CPU").with_restart(max_restarts=1000, delay_s=0.0)
    builder.role("ACTOR").run(Actor).total(fused or 1).resource(cpu=0)
    builder.role("ROLLOUT").run(Rollout).total(fused or 2).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    if fused:
        builder.with_fusion("ACTOR", "ROLLOUT", *(["TRAINER"] if fused == 1 else []))
    return builder.build()
