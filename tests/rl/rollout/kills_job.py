"""A small training whose engines answer some prompts ten times slower, and that one prompt may kill:
``kills_job.py MODEL PIPELINE ENGINES STEPS [POISON]``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from rlmesh import RLJobBuilder, rpc
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.rewards import Reward, Score
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings

FAST_S, SLOW_S = 0.03, 0.3
BATCH = 4
PROMPTS = 18
ROWS = [{"prompt": "abcdef"[place % 6] + "gh"[place // 6 % 2] * (place // 12) + ">"} for place in range(PROMPTS)]
RESTARTS = 1000


def letters(response: str) -> Score:
    return Score(response.count("a") / 4)


class SlowRollout(RolloutRole):
    """Waits before it samples: ten times as long for every third position."""

    @rpc(concurrent=4096)
    async def sample(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        slow = any(request.position % 3 == 0 for request in requests)
        await asyncio.sleep(SLOW_S if slow else FAST_S)
        if any(request.position == int(os.environ["POISON"]) for request in requests):
            os.kill(os.getpid(), signal.SIGSEGV)
        return await super().sample(requests, params)


def main(model: str, pipeline: str, engines: int, steps: int) -> None:
    run = Run(
        model=model, data=ROWS, rewards=[Reward(letters, inline=True)], steps=steps, batch_size=BATCH, save_every=3,
        algorithm=GRPO(samples=2, correction=None if pipeline == "sync" else "token"), pipeline=pipeline,
        actor=ActorSettings(lr=1e-3), rollout=RolloutSettings(engines=engines, max_tokens=4, in_flight=2),
    )  # fmt: skip
    builder = RLJobBuilder().config(run).node_num(1).device_type("CPU").device_per_node(8)
    builder.trainer().resource(cpu=0)
    builder.actor().resource(cpu=0)
    builder.rollout(SlowRollout).resource(cpu=0).total(engines)
    builder.with_restart(max_restarts=RESTARTS, delay_s=0.05)
    builder.build().submit("kills", view="plain")


if __name__ == "__main__":
    os.environ["POISON"] = sys.argv[5] if len(sys.argv) > 5 else "-1"
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
