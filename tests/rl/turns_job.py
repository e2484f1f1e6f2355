"""A small PPO training whose roles share one device, or that is fused, and that records who is awake:
``turns_job.py MODEL shared|fused [gpu]``.

Each role writes a line when a part of it begins to wake, one before it goes to sleep, and one when it sleeps, with the
bytes of memory that the part has then, and those that the process has on its GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlmesh import RLJobBuilder, current_worker
from rlmesh.rl.algorithms import PPO
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.device_turns import DeviceTurns
from rlmesh.rl.roles.fused import ActorRolloutRef
from rlmesh.rl.roles.reference import ReferenceRole
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, RolloutSettings
from tests.rl.run_job import ROWS, is_a

FILE = "turns.jsonl"


class RecordedTurns(DeviceTurns):
    """Writes down each change."""

    role: Any

    def add(self, name: str, *, wake: Callable[[], object], sleep: Callable[[], object]) -> None:
        def wakes() -> None:
            self.write(name, "wakes")
            wake()

        def sleeps() -> None:
            self.write(name, "was awake")
            sleep()
            self.write(name, "sleeps")

        self.write(name, "wakes")
        super().add(name, wake=wakes, sleep=sleeps)

    def write(self, part: str, event: str) -> None:
        worker = current_worker()
        reserved = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        line = [time.monotonic(), worker.name, part, event, bytes_of(self.role, part), reserved]
        with (Path(worker.run_dir) / FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")


def bytes_of(role: Any, part: str) -> int:
    """The memory of a part's weights, and of a training engine's optimizer state."""
    if part == "training":
        tensors = list(role.engine._memory())
    elif part == "rollout":
        engine: Any = role.engine if isinstance(role, RolloutRole) else role.rollout_engine
        tensors = list(engine.model.parameters())
    else:
        model = role.policy.model if isinstance(role, ReferenceRole) else role.reference.model
        tensors = list(model.parameters())
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    return sum(storage.nbytes() for storage in storages.values())


class Recorded:
    """Roles whose turns are recorded."""

    def make_turns(self) -> DeviceTurns:
        turns = RecordedTurns(leased=len(current_worker().collocated_roles) > 1)
        turns.role = self
        return turns


class Actor(Recorded, ActorRole): ...


class Critic(Recorded, CriticRole): ...


class Reference(Recorded, ReferenceRole): ...


class Rollout(Recorded, RolloutRole): ...


class Fused(Recorded, ActorRolloutRef): ...


def settings(model: str) -> Run:
    return Run(
        model=model, data=ROWS, rewards=[is_a], algorithm=PPO(samples=4, kl=0.01), batch_size=8, steps=4, save_every=2,
        actor=ActorSettings(lr=1e-2), critic=CriticSettings(lr=1e-2), rollout=RolloutSettings(max_tokens=4),
    )  # fmt: skip


def build(model: str, kind: str, device: str = "cpu") -> Any:
    builder = RLJobBuilder().config(settings(model)).device_type(device.upper()).device_per_node(1)
    builder.trainer().resource(cpu=0)
    roles = ["ACTOR", "CRITIC"]
    builder.actor(Fused if kind == "fused" else Actor).resource(accelerator=1)
    builder.critic(Critic).resource(accelerator=1)
    if kind == "shared":
        builder.rollout(Rollout).resource(accelerator=1)
        builder.reference(Reference).resource(accelerator=1)
        roles += ["ROLLOUT", "REFERENCE"]
    return builder.with_collocation(*roles).build()


if __name__ == "__main__":
    build(*sys.argv[1:]).submit("turns", view="plain")
