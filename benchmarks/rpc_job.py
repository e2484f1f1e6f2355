"""Two figures of rlmesh that only a job can give: how fast eight members are up, and how fast a death is known.

Run by rpc_rlmesh.py as ``python rpc_job.py members_8|death FOLDER``; prints a JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from rpc_peer import Body

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc
from rlmesh.errors import CallError

MEMBERS = 8
WAITING = 100
DEATH_LIMIT_S = 20.0


class Member(Body):
    echo_def = rpc("echo_def")(Body.echo_def)
    pid = rpc("pid")(Body.pid)
    nap = rpc("nap")(Body.nap)


class Caller:
    def run(self) -> None:
        if current_worker().job_info.user_config["row"] == "death":
            Path(current_worker().job_info.user_config["result"]).write_text(json.dumps({"death": self._death_ms()}))

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


def main(row: str, folder: Path) -> dict[str, float]:
    result = folder / f"{row}.json"
    result.unlink(missing_ok=True)
    builder = DLJobBuilder().device_type("CPU").config({"row": row, "result": str(result)})
    builder.role("MEMBER").run(Member).total(MEMBERS)
    builder.role("CALLER").run(Caller)
    job = builder.build()
    status = job.submit(f"rpc-{row}", view="none", run_dir=folder / f"run-{os.getpid()}").status
    if row == "death":
        figures: dict[str, float] = json.loads(result.read_text())
        return figures
    return {"members_8": status.all_serving_s or float("nan")}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
