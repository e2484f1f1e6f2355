"""Jobs with roles that share processes; a trainer works with them and writes down what it saw."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RestartEvent, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError
from tests.master.launched import command, descendants


def config() -> dict[str, Any]:
    values: dict[str, Any] = current_worker().job_info.user_config
    return values


class Part:
    """What both roles have in common."""

    def __init__(self) -> None:
        self.made_as = current_worker().name

    def setup(self) -> None:
        self.set_up_as = current_worker().name
        self.because = ""
        self.seen: list[int] = []
        print(f"{current_worker().name} is set up")

    def on_restart(self, event: RestartEvent) -> None:
        self.because = f"{current_worker().name} because of {event.cause}"

    def teardown(self) -> None:
        with open(current_worker().run_dir / "teardowns", "a") as file:
            file.write(f"{current_worker().name}\n")

    @rpc
    def who(self) -> dict[str, Any]:
        worker = current_worker()
        return {
            "name": worker.name,
            "role": worker.role,
            "pid": os.getpid(),
            "incarnation": worker.incarnation,
            "made_as": self.made_as,
            "set_up_as": self.set_up_as,
            "fused": sorted(worker.fused_roles),
            "main": threading.current_thread() is threading.main_thread(),
            "because": self.because,
            "devices": list(worker.devices),
        }

    @rpc
    async def name_async(self, wait_s: float = 0.0) -> str:
        return current_worker().name

    @rpc(concurrent=2)
    def name_in_pool(self) -> str:
        return current_worker().name

    @rpc
    def names(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield current_worker().name

    @rpc
    async def names_async(self, count: int) -> AsyncIterator[str]:
        for _ in range(count):
            yield current_worker().name

    @rpc
    def note(self, number: int) -> None:
        self.seen.append(number)

    @rpc
    def noted(self) -> list[int]:
        return self.seen

    @rpc
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @rpc
    def fail(self) -> None:
        raise ValueError(f"raised by {current_worker().name}")


class Actor(Part):
    def setup(self) -> None:
        super().setup()
        self.weights = [0.0]

    @rpc
    def update(self, value: float) -> None:
        self.weights[0] = value

    @rpc
    def call_myself(self) -> str:
        error = RoleGroup("ROLLOUT")[current_worker().rank].call("noted").exception()
        return type(error).__name__


class Rollout(Part):
    def setup(self) -> None:
        if config().get("raises"):
            raise RuntimeError("no engine")
        super().setup()

    @rpc
    def weight(self) -> float:
        """Of the actor in the same process, without a copy."""
        value: float = current_worker().fused("ACTOR").weights[0]
        return value


class Other:
    @rpc
    def pid(self) -> int:
        return os.getpid()


class Trainer:
    def run(self) -> None:
        Path(config()["out"]).write_text(json.dumps(getattr(self, config()["scenario"])()))

    def look(self) -> dict[str, Any]:
        actor, rollout = RoleGroup("ACTOR"), RoleGroup("ROLLOUT")
        updates = [actor[i].call("update", float(i + 1)) for i in range(2)]
        for update in updates:
            update.result()
        for number in range(200):
            rollout.notify("note", number)
            actor.notify("note", -number)
        return {
            "actors": actor.call("who").result(),
            "rollouts": rollout.call("who").result(),
            "weights": rollout.call("weight").result(),
            "async": rollout.call("name_async").result() + actor.call("name_async").result(),
            "pool": rollout.call("name_in_pool").result() + actor.call("name_in_pool").result(),
            "stream": [*rollout[1].stream("names", 3), *actor[1].stream("names_async", 2)],
            "noted": [rollout.call("noted").result(), actor.call("noted").result()],
            "reentrant": actor.call("call_myself").result(),
            "own_error": str(rollout[0].call("fail").exception()),
        }

    def masterless(self) -> dict[str, Any]:
        """The master is killed, and then, as soon as there is another one, a process of two roles."""
        actor, rollout = RoleGroup("ACTOR"), RoleGroup("ROLLOUT")
        before = actor.call("who").result()
        (master,) = [pid for pid in descendants(os.getppid()) if "prime_master" in command(pid)]
        os.kill(master, signal.SIGKILL)
        alone = rollout.call("who").result()
        deadline = time.monotonic() + 20.0
        while not any("prime_master" in command(pid) for pid in descendants(os.getppid()) if pid != master):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(before[1]["pid"], signal.SIGKILL)
        current_worker().events(wait_s=10.0)
        again = [*actor.options(idempotent=True).call("who").result(), *rollout.call("who").result()]
        return {"before": before, "alone": alone, "again": again}

    def killed(self) -> dict[str, Any]:
        """One process is killed while both of its roles have calls."""
        actor, rollout, other = RoleGroup("ACTOR"), RoleGroup("ROLLOUT"), RoleGroup("OTHER")
        before = [*actor.call("who").result(), *rollout.call("who").result()]
        others = other.call("pid").result()
        pending = [actor[1].call("wait", 60.0), rollout[1].call("wait", 60.0)]
        os.kill(before[1]["pid"], signal.SIGKILL)
        errors = [future.exception() for future in pending]
        meanwhile = [actor[1].call("who"), rollout[1].call("who")]
        events = list(current_worker().events(wait_s=10.0))
        after = [*actor.call("who").result(), *rollout.call("who").result()]
        while len(events) < 4:
            events += current_worker().events(wait_s=10.0)
        return {
            "before": before,
            "errors": [[type(e).__name__, e.role, e.rank] for e in errors if isinstance(e, CallError)],
            "meanwhile": [future.result()["incarnation"] for future in meanwhile],
            "after": after,
            "others": [others, other.call("pid").result()],
            "events": [[event.role, list(event.ranks), event.phase] for event in events],
        }


def build(scenario: str, out: Path, **settings: Any) -> DLJob:
    builder = DLJobBuilder().config({"scenario": scenario, "out": str(out), **settings}).device_type("CPU")
    builder.role("ACTOR").run(Actor).total(2).resource(cpu=0, accelerator=1)
    builder.role("ROLLOUT").run(Rollout).total(2).resource(cpu=0, accelerator=1)
    builder.role("OTHER").run(Other).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.with_fusion("ACTOR", "rollout").build()


class FusedTrainer(Trainer):
    """Lives in the process of the actor that it calls."""

    def look(self) -> dict[str, Any]:
        calls = RoleGroup("ACTOR").call("who").result()
        return {"pid": os.getpid(), "name": current_worker().name, "actors": calls}


def build_with_trainer(out: Path) -> DLJob:
    builder = DLJobBuilder().config({"scenario": "look", "out": str(out)}).device_type("CPU")
    builder.role("ACTOR").run(Actor).resource(cpu=0)
    builder.role("OTHER").run(Other).resource(cpu=0)
    builder.role("TRAINER").run(FusedTrainer).resource(cpu=0)
    return builder.with_fusion("ACTOR", "TRAINER").build()


class Ranks:
    """Ranks of a process group."""

    def setup(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @rpc
    def rank(self) -> list[str | None]:
        return [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]

    @rpc
    def sum(self) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return float(value)

    def teardown(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Judge:
    """No rank of its own: it lives in the ranks' processes."""

    @rpc
    def rank(self) -> list[str | None]:
        return [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]

    @rpc
    def sum(self) -> float:
        value: float = current_worker().fused("ACTOR").sum()
        return value

    @rpc
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class RanksTrainer(Trainer):
    def look(self) -> dict[str, Any]:
        actor, judge = RoleGroup("ACTOR"), RoleGroup("JUDGE")
        seen = {
            "ranks": actor.call("rank").result(),
            "judged": judge.call("rank").result(),
            "sums": judge.call("sum").result(),
        }
        judge[1].call("die").exception()
        current_worker().events(wait_s=10.0)
        return {**seen, "again": judge.options(idempotent=True).call("sum").result()}
