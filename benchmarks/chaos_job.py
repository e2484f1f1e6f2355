"""The job of the kill grid: a trainer that goes on from its checkpoint after a restart, and roles that can be asked
again.

Six processes: TRAINER, ACTOR 0 and 1 (a group), ROLLOUT 0 and 1, REWARD. Every step generates, scores, trains, syncs
weights (1 MiB per call, through shared memory) and saves. At the end the trainer writes what it computed, so that the
result of a disturbed run can be compared with that of a quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc

STEPS = 6
WEIGHTS = 1 << 18


class Actor:
    def setup(self) -> None:
        self.weights = np.zeros(WEIGHTS, np.float32)

    @rpc
    def train(self, step: int, reward: float) -> np.ndarray[Any, Any]:
        self.weights = np.full(WEIGHTS, step + reward, np.float32)
        return self.weights

    @rpc
    def save(self, step: int) -> None:
        time.sleep(0.02)
        path = current_worker().run_dir / f"actor-{current_worker().rank}.json"
        write(path, {"step": step, "weight": float(self.weights[0])})


class Rollout:
    def setup(self) -> None:
        self.version = -1

    @rpc
    def load_weights(self, step: int, weights: np.ndarray[Any, Any]) -> None:
        time.sleep(0.02)
        self.version = step

    @rpc
    def generate(self, items: list[int]) -> list[int]:
        time.sleep(0.01)
        return [item * item for item in items]


class Reward:
    @rpc
    def score(self, items: list[int]) -> float:
        time.sleep(0.01)
        return float(sum(items))


class Trainer:
    def run(self) -> None:
        actor = RoleGroup[Actor]("ACTOR").options(timeout_s=20.0, idempotent=True)
        rollout = RoleGroup[Rollout]("ROLLOUT").options(timeout_s=20.0, idempotent=True)
        reward = RoleGroup[Reward]("REWARD").options(timeout_s=20.0, idempotent=True)
        path = current_worker().run_dir / "trainer.json"
        state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"step": 0, "rewards": []}
        for step in range(state["step"], STEPS):
            samples = list(rollout.call_batch(Rollout.generate, 8, list(range(step, step + 8))))
            value = reward.call_rank0(Reward.score, samples).result()
            weights = actor.call(Actor.train, step, value).result()[0]
            rollout.call(Rollout.load_weights, step, weights).result()
            actor.call(Actor.save, step).result()
            state = {"step": step + 1, "rewards": [*state["rewards"], value]}
            write(path, state)
            current_worker().report(step, reward=value, pid=os.getpid())
        write(current_worker().run_dir / "result.json", state)


def write(path: Path, value: object) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    os.replace(draft, path)


def build() -> DLJob:
    builder = DLJobBuilder().device_type("CPU")
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    builder.role("ACTOR").train(Actor).nnodes(1).nproc_per_node(2).resource(cpu=0)
    builder.role("ROLLOUT").run(Rollout).total(2).resource(cpu=0)
    builder.role("REWARD").run(Reward).total(1).resource(cpu=0)
    return builder.build()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="grid")
    build().submit(parser.parse_args().name)
