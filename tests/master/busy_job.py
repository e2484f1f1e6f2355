"""Jobs whose members do not answer, each for a reason of its own, and what people are shown meanwhile."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError, CallTimeout


class Worker:
    @rpc
    def facts(self) -> tuple[int, int]:
        return os.getpid(), current_worker().incarnation

    @rpc
    def hold(self, seconds: float) -> None:
        """Be in C with the interpreter's lock."""
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))

    @rpc
    def wedge(self) -> None:
        time.sleep(1000)


def shown(command: str, *options: str) -> str:
    argv = [sys.executable, "-m", "rlmesh.cli.main", command, current_worker().job_info.name, *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout


def until(words: str, *command: str, within_s: float = 15.0) -> str:
    """What is shown, once it has these words, or at the end."""
    deadline = time.monotonic() + within_s
    while words not in (text := shown(*command)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return text


class Trainer:
    def run(self) -> None:
        config: dict[str, Any] = current_worker().job_info.user_config
        seen = getattr(self, config["how"])(RoleGroup("W")[0])
        Path(config["out"]).write_text(json.dumps(seen))

    def held(self, worker: Any) -> Any:
        future = worker.call("hold", 60.0)
        words = "busy in W:0.hold() for"
        seen: dict[str, Any] = {name: until(words, name) for name in ("status", "ps")}
        seen["pending"] = until(words, "ps", "--pending")
        try:
            worker.options(timeout_s=0.5).call("facts").result()
        except CallTimeout as error:
            seen["late"] = str(error)
        try:
            future.result()
        except CallError as error:
            seen["lost"] = [type(error).__name__, str(error)]
        return seen

    def stopped(self, worker: Any) -> Any:
        pid, _ = worker.call("facts").result()
        os.kill(pid, signal.SIGSTOP)
        seen: dict[str, Any] = {name: until("stopped for", name) for name in ("status", "ps")}
        try:
            worker.options(timeout_s=0.5).call("facts").result()
        except CallTimeout as error:
            seen["late"] = str(error)
        os.kill(pid, signal.SIGCONT)
        seen["again"] = worker.call("facts").result()
        return seen

    def wedged(self, worker: Any) -> Any:
        began = time.monotonic()
        try:
            worker.options(timeout_s=0.5).call("wedge").result()
        except CallTimeout:
            pass
        words = "its call was cancelled or timed out"
        seen: dict[str, Any] = {name: until(words, name) for name in ("status", "ps")}
        seen["pending"] = until(words, "ps", "--pending")
        while time.monotonic() < began + 40.0:
            try:
                _, seen["incarnation"] = worker.options(timeout_s=0.5).call("facts").result()
                if seen["incarnation"]:
                    break
            except CallError:
                pass
        return seen


def build(how: str, out: Path, hang_s: float) -> DLJob:
    builder = DLJobBuilder().config({"how": how, "out": str(out)}).device_type("CPU").limits(hang_s=hang_s)
    builder.role("W").run(Worker).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
