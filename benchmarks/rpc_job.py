"""Figures of rlmesh that only a job can give: how fast eight members are up, how fast a death is known, and how long
an echo takes in a service that started or joined a job, and in the job's trainer.

Run by rpc_rlmesh.py as ``python rpc_job.py ROW FOLDER``; prints a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rpc_peer import Body, seconds_of, seconds_of_blocking

from rlmesh import DLJob, DLJobBuilder, RoleGroup, Runtime, current_worker, rpc
from rlmesh.errors import CallError

MEMBERS = 8
ECHOES = 1000
WAITING = 100
DEATH_LIMIT_S = 20.0


class Member(Body):
    echo = rpc("echo")(Body.echo)
    echo_def = rpc("echo_def")(Body.echo_def)
    pid = rpc("pid")(Body.pid)
    nap = rpc("nap")(Body.nap)


class Caller:
    def run(self) -> None:
        config = current_worker().job_info.user_config
        if config["row"] == "death":
            Path(config["result"]).write_text(json.dumps({"death": self._death_ms()}))
        elif config["row"] == "echo_trainer":
            member = RoleGroup("MEMBER")[0]
            times = seconds_of_blocking(lambda number: member.call("echo", number).result(), ECHOES)
            Path(config["result"]).write_text(json.dumps({"echo_trainer": _median_us(times)}))

    def _death_ms(self) -> float:
        """Milliseconds from SIGKILL of a member until all calls that wait for it have failed."""
        member = RoleGroup("MEMBER")[0]
        pid = member.call("pid").result()
        waits = [member.call("nap", 60.0), *(member.call("echo_def", k) for k in range(WAITING - 1))]
        time.sleep(0.5)
        assert not any(future.done() for future in waits)
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        errors = [future.exception(DEATH_LIMIT_S) for future in waits]
        took = time.perf_counter() - start
        assert all(isinstance(error, CallError) for error in errors)
        return 1e3 * took


def _median_us(times: Sequence[float]) -> float:
    return 1e6 * statistics.median(times)


async def _of_service(row: str, job: DLJob, run_dir: Path) -> list[float]:
    """Seconds of echoes by this program, which started the job, or by one that joined it."""
    async with job.start(f"rpc-{row}", view="none", run_dir=run_dir) as handle, handle.join() as runtime:
        if row == "echo_service":
            return await _echoes(runtime)
        address_and_key = handle.address_and_key()
        assert address_and_key is not None
        address, key = address_and_key
        other = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "join", address, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        output, _ = await other.communicate(key.hex().encode())
        times: list[float] = json.loads(output)
        return times


async def _joined(address: str, key: bytes) -> list[float]:
    async with Runtime.join(address, key=key) as runtime:
        return await _echoes(runtime)


async def _echoes(runtime: Runtime) -> list[float]:
    member = RoleGroup("MEMBER", runtime=runtime)[0]
    return await seconds_of(lambda number: member.call("echo", number), ECHOES)


def main(row: str, folder: Path) -> dict[str, float]:
    result = folder / f"{row}.json"
    result.unlink(missing_ok=True)
    run_dir = folder / f"run-{os.getpid()}"
    builder = DLJobBuilder().device_type("CPU").config({"row": row, "result": str(result)})
    builder.role("MEMBER").run(Member).total(1 if row.startswith("echo_") else MEMBERS)
    if row in ("echo_service", "echo_joined"):
        return {row: _median_us(uvloop.run(_of_service(row, builder.build(), run_dir)))}
    builder.role("CALLER").run(Caller)
    status = builder.build().submit(f"rpc-{row}", view="none", run_dir=run_dir).status
    if row in ("death", "echo_trainer"):
        figures: dict[str, float] = json.loads(result.read_text())
        return figures
    return {"members_8": status.all_serving_s or float("nan")}


if __name__ == "__main__":
    if sys.argv[1] == "join":
        print(json.dumps(uvloop.run(_joined(sys.argv[2], bytes.fromhex(sys.stdin.read())))))
        sys.exit()
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
