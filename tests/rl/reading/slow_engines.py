"""A job whose engines take a time for each prompt, as engines do whose batch is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlmesh import RLJobBuilder, rpc
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.rollout.requests import GroupRequest
from rlmesh.rl.trainers.run import Run

PROMPT_S = 0.15


class BusyRollout(RolloutRole):
    """Takes the same time for each prompt."""

    @rpc(concurrent=4096)
    async def sample(self, requests: Sequence[GroupRequest], params: SamplingParams) -> list[list[Sample]]:
        await asyncio.sleep(PROMPT_S * len(requests))
        return await super().sample(requests, params)


def job_of(run: Run) -> Any:
    builder = RLJobBuilder().config(run).node_num(1).device_type("CPU").device_per_node(8)
    builder.trainer().resource(cpu=0)
    builder.actor().resource(cpu=0)
    builder.rollout(BusyRollout).resource(cpu=0).total(run.rollout.engines)
    return builder.build()
