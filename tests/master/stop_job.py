"""A job whose ranks count steps at changing speeds, save where they stop, and go on there.

With ``--deaf`` the ranks handle SIGTERM themselves: they need ``--needs`` seconds to write ``done.<rank>``. And they
do not stop where all do: they stand still there.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rlmesh import BaseWorkload, DLJobBuilder, current_worker, rpc
from rlmesh.job.context import StopRequest


class Trainer(BaseWorkload):
    def setup(self) -> None:
        self.path = current_worker().run_dir / f"state.{self.rank}"
        resume = current_worker().resume
        self.step = json.loads(self.path.read_text())["step"] + 1 if self.path.exists() else 0
        print(f"rank {self.rank} starts at step {self.step}, resume {resume}, pid {os.getpid()}", flush=True)
        self.usr1 = 0
        signal.signal(signal.SIGUSR1, self._on_usr1)
        if self.config["deaf"]:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self.usr1 += 1
        print(f"USR1 of rank {self.rank}, number {self.usr1}", flush=True)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        print(f"rank {self.rank} got SIGTERM", flush=True)
        time.sleep(self.config["needs"])
        (current_worker().run_dir / f"done.{self.rank}").write_text("done")
        sys.exit(0)

    def run(self) -> None:
        while self.step < self.config["steps"]:
            # By turns the one and the other is faster, so that they are apart, but never by more than some steps.
            time.sleep(0.005 + 0.02 * ((self.step // 5 + self.rank) % 2))
            request = current_worker().step_boundary(self.step)
            if self.step % 10 == 0:
                print(f"rank {self.rank} at step {self.step}", flush=True)
            if request is not None and self.config["deaf"]:
                time.sleep(self.config["needs"])
            elif request is not None:
                print(f"rank {self.rank} stops after step {self.step}: {request.reason}", flush=True)
                return
            self.step += 1

    def on_stop(self, request: StopRequest) -> None:
        self.path.write_text(json.dumps({"step": request.step, "own": self.step}))

    def teardown(self) -> None:
        print(f"teardown of rank {self.rank}", flush=True)


class Server(BaseWorkload):
    """Does not drive the job, has no steps, and saves too."""

    @rpc
    def ping(self) -> str:
        return "pong"

    def on_stop(self, request: StopRequest) -> None:
        (current_worker().run_dir / "server").write_text(f"{request.step} {request.reason}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--needs", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2)
    options = parser.parse_args()
    builder = DLJobBuilder().config(vars(options)).device_type("CPU")
    builder.role("TRAINER").run(Trainer).total(options.ranks).per_node(options.per_node)
    builder.role("SERVER").run(Server)
    job = builder.build()
    print("result", job.submit("stops").status.stage, Path.cwd().name)
