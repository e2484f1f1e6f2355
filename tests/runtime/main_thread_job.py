"""A role with a library that insists on the main thread, and a trainer that calls it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc


class Engine:
    """``run()`` makes steps until it is told to end."""

    def setup(self) -> None:
        self.ended = threading.Event()
        self.step = 0

    def run(self) -> None:
        while not self.ended.is_set():
            self.ended.wait(0.002)
            self.step += 1
            current_worker().step_boundary()

    @rpc
    def where(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    @rpc(main_thread=True)
    def handle(self) -> str:
        """Python sets signal handlers on the main thread only."""
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        return f"set on {threading.current_thread().name}"

    @rpc(main_thread=True)
    def items(self, count: int) -> Iterator[bool]:
        for _ in range(count):
            yield self.where()

    @rpc
    def end(self) -> None:
        self.ended.set()


class Server(Engine):
    """Has no ``run()``: serves on its main thread."""

    run = None  # type: ignore[assignment]


class Trainer:
    def run(self) -> None:
        engine, server = RoleGroup("ENGINE"), RoleGroup("SERVER")
        seen: dict[str, Any] = {
            "served": [server.call(name).result() for name in ("where", "handle")],
            "busy": [engine.call(name).result() for name in ("where", "handle")],
            "items": list(engine.stream("items", 40)),
        }
        # Calls of both kinds from all sides, many at once.
        mixed = [engine.call("handle" if i % 3 == 0 else "where") for i in range(300)]
        seen["mixed"] = [future.result() for future in mixed].count([False])
        last = [engine.call("end"), engine.call("handle")]
        seen["last"] = [future.result() for future in last][1]
        Path(current_worker().job_info.user_config["out"]).write_text(json.dumps(seen))


def build(out: Path) -> DLJob:
    builder = DLJobBuilder().config({"out": str(out)}).device_type("CPU")
    builder.role("ENGINE").run(Engine).resource(cpu=0)
    builder.role("SERVER").run(Server).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
