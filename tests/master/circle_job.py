"""Jobs whose members call each other, in circles and nearly so."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import RLMeshError
from rlmesh.runtime.future import Future


def told(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


class Node:
    """``go`` calls the next one's ``echo`` after a while."""

    @rpc
    def go(self, then: str, method: str = "echo", *args: str) -> Any:
        time.sleep(0.2)
        role, _, rank = then.partition(":")
        return RoleGroup(role)[int(rank)].call(method, *args).result()

    @rpc
    def echo(self) -> str:
        return "echo"

    @rpc(concurrent=2)
    def pass_on(self, role: str) -> Any:
        return RoleGroup(role)[0].call("echo").result()

    @rpc
    async def go_async(self, then: str) -> Any:
        await asyncio.sleep(0.2)
        return await RoleGroup(then)[0].call("go_async", "") if then else ""

    @rpc
    async def go_gathering(self, then: str) -> Any:
        await asyncio.sleep(0.2)
        return await asyncio.gather(*(RoleGroup(then)[0].call("go_gathering", "") for _ in range(bool(then))))

    @rpc
    def group(self, then: str) -> Any:
        time.sleep(0.2)
        return RoleGroup(then).options(idempotent=True).call("echo").result()

    @rpc
    def forget(self, then: str) -> str:
        """Calls back and does not wait for it."""
        RoleGroup(then)[0].call("echo")
        time.sleep(4.0)
        return "done"

    @rpc
    def patient(self, then: str) -> str:
        """Waits with a limit of its own, and has a way to go on."""
        time.sleep(0.2)
        try:
            return str(RoleGroup(then)[0].call("echo").result(timeout=4.0))
        except TimeoutError:
            return "went on"

    @rpc
    def slow(self) -> str:
        time.sleep(4.0)
        return "slow"


class SetsUp:
    def setup(self) -> None:
        config: dict[str, Any] = current_worker().job_info.user_config
        mine = current_worker().role
        try:
            RoleGroup(config["setup"].get(mine, mine))[0].call("echo").result()
            self.seen = ["answered", ""]
        except RLMeshError as error:
            self.seen = told(error)

    @rpc
    def echo(self) -> str:
        return "echo"

    @rpc
    def what(self) -> list[str]:
        return self.seen


Calls = list[tuple[str, str, list[str]]]


def ask(calls: Calls) -> list[Any]:
    """All at once; what each gave."""
    futures: list[Future[Any]] = []
    for name, method, args in calls:
        role, _, rank = name.partition(":")
        futures.append(RoleGroup(role)[int(rank)].call(method, *args))
    seen: list[Any] = []
    for future in futures:
        try:
            seen.append(future.result())
        except RLMeshError as error:
            seen.append(told(error))
    return seen


class Trainer:
    @rpc(main_thread=True)
    def on_main(self) -> str:
        return "main"

    def run(self) -> None:
        config: dict[str, Any] = current_worker().job_info.user_config
        answers = []
        for calls in config["rounds"]:
            began = time.monotonic()
            seen = ask(calls)
            answers.append([seen, time.monotonic() - began])
        Path(config["out"]).write_text(json.dumps(answers))


def build(out: Path, rounds: list[Calls], *, setup: dict[str, str] | None = None, hang_s: float | None = None) -> DLJob:
    """Roles A, B and C, a group G of two ranks, and a trainer that makes calls, round by round: name, method,
    arguments. ``setup``: whom each role calls in its ``setup()``, itself by default."""
    builder = DLJobBuilder().config({"out": str(out), "rounds": rounds, "setup": setup or {}}).device_type("CPU")
    if hang_s is not None:
        builder.limits(hang_s=hang_s)
    for role in "ABC":
        builder.role(role).run(Node if setup is None else SetsUp).resource(cpu=0)
    builder.role("G").train(Node).total(2).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
