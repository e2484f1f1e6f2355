"""A training with two engines, of which one dies in the middle of a push, and starts again only after more steps."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmesh import DLConfig, RLJobBuilder, current_worker, rpc
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.rewards import Reward
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.trainers.progress import Progress
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from tests.rl.rollout.kills_job import BATCH, ROWS, letters
from tests.weights.mesh import until

STEPS, DIES_AT, BACK_AFTER = 20, 3, 8
"""Steps of the run, the version whose push the engine does not survive, and the step before which it is not back."""
BACK, SERVED = "back", "served.txt"
"""Files of the engine after its return: there when it is set up; the versions by which it sampled, one per line."""


class DyingRollout(RolloutRole):
    """Engine 1 dies as it takes a version, once."""

    def setup(self) -> None:
        self.worker = current_worker()
        self.folder = Path(self.worker.run_dir)
        self.dies = self.worker.rank == 1 and self.worker.incarnation == 0
        self.is_back = self.worker.incarnation > 0
        if self.is_back:  # if the training did not go on without this engine, it would never be
            until(lambda: Progress.read(self.folder).step >= BACK_AFTER)
        super().setup()
        if self.is_back:
            (self.folder / BACK).touch()

    @rpc(concurrent=64)
    def weights_stage(self, session: str, push: int, version: int, *rest: Any) -> None:
        if self.dies and version == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        super().weights_stage(session, push, version, *rest)

    @rpc(concurrent=4096)
    async def sample(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        if self.worker.rank == 0 and (self.weights.version or 0) > BACK_AFTER:  # steps are faster than a process starts
            await asyncio.to_thread(until, (self.folder / BACK).exists)
        found = await super().sample(requests, params)
        if self.is_back:
            with (self.folder / SERVED).open("a") as file:
                file.writelines(f"{one.policy_version}\n" for samples in found for one in samples)
        return found


def build(model: Path, pipeline: str) -> DLConfig:
    run = Run(
        model=str(model), data=ROWS, rewards=[Reward(letters, inline=True)], steps=STEPS, batch_size=BATCH,
        algorithm=GRPO(samples=2, correction="token"), pipeline=pipeline, actor=ActorSettings(lr=1e-3),
        rollout=RolloutSettings(engines=2, max_tokens=8, in_flight=2),
    )  # fmt: skip
    builder = RLJobBuilder().config(run).node_num(1).device_type("CPU").device_per_node(8)
    builder.trainer().resource(cpu=0)
    builder.actor().resource(cpu=0)
    builder.rollout(DyingRollout).resource(cpu=0).total(2)
    builder.with_restart(max_restarts=3, delay_s=0.05)
    return builder.build()
