"""A job whose members have children, and daemons that try to get away."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc

DAEMON = """
import os, sys
if os.fork(): os._exit(0)
os.setsid()
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
os.closerange(0, 3)
os.execvp("sleep", ["sleep", "1000"])
"""


class Actor:
    def setup(self) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        out = subprocess.run([sys.executable, "-I", "-S", "-c", DAEMON], stdout=subprocess.PIPE, check=True).stdout
        print(f"family of {current_worker().name}: {os.getpid()} {child.pid} {int(out)}.", flush=True)

    @rpc
    def crash(self) -> None:
        import ctypes

        ctypes.string_at(0)

    @rpc
    def big(self) -> bytes:
        return bytes(8 << 20)  # through shared memory


class Trainer:
    def run(self) -> None:
        actors = RoleGroup[Actor]("ACTOR")
        held = actors.call(Actor.big).result()
        print(f"holds {len(held)}", flush=True)
        crash = current_worker().job_info.user_config["crash"]
        if crash:
            actors[2].notify(Actor.crash)
        time.sleep(60)


if __name__ == "__main__":
    builder = DLJobBuilder().config({"crash": "--crash" in sys.argv}).device_type("CPU")
    builder.role("ACTOR").run(Actor).total(4).resource(cpu=0.1).restart(
        "member" if "--restart" in sys.argv else "never"
    )
    builder.role("TRAINER").run(Trainer).resource(cpu=0.1)
    builder.build().submit("family")
