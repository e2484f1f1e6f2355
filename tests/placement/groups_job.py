"""A role of two groups, and a trainer that calls them by name while one member is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import RoleNotFound


class Engine:
    @rpc
    def see(self) -> tuple[int, str, int, int]:
        worker = current_worker()
        return worker.rank, worker.group, worker.incarnation, os.getpid()

    @rpc
    def double(self, items: list[int]) -> list[tuple[int, int]]:
        return [(current_worker().rank, 2 * item) for item in items]


class Trainer:
    def run(self) -> None:
        prefill, decode = RoleGroup[Engine]("ENGINE/prefill"), RoleGroup("ENGINE", group="decode")
        seen: dict[str, Any] = {
            "prefill": prefill.call(Engine.see).result(),
            "decode": decode.call(Engine.see).result(),
            "all": len(RoleGroup("ENGINE")),
            "batch": list(decode.call_batch("double", 5, list(range(5)))),
        }
        os.kill(seen["decode"][1][3], signal.SIGKILL)
        current_worker().events(wait_s=10.0)
        seen["again"] = decode.options(idempotent=True).call(Engine.see).result()
        seen["any"] = prefill.call_any(Engine.see).result()[1]
        try:
            RoleGroup("ENGINE/prefil").call(Engine.see)
        except RoleNotFound as error:
            seen["error"] = str(error)
        Path(current_worker().job_info.user_config["out"]).write_text(json.dumps(seen))


def build(out: Path) -> DLJob:
    builder = DLJobBuilder().config({"out": str(out)}).device_type("CPU")
    builder.role("ENGINE").run(Engine).resource(cpu=0).with_groups(prefill=1, decode=2)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
