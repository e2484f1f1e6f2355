"""A job that saves each of its steps, so that it goes on from there when it is started again as a whole."""

from __future__ import annotations

import argparse
import json
import os
import time

from rlmesh import DLJob, DLJobBuilder, RoleGroup, current_worker, rpc


class Trainer:
    def setup(self) -> None:
        worker = current_worker()
        self.path = worker.run_dir / f"state.{worker.rank}"
        self.step = int(json.loads(self.path.read_text())["step"]) + 1 if self.path.exists() else 0
        where = f"incarnation {worker.incarnation}, node {worker.node_rank}, pid {os.getpid()}"
        print(f"rank {worker.rank} starts at step {self.step}, {where}", flush=True)

    def run(self) -> None:
        config = current_worker().job_info.user_config
        server = RoleGroup[Server]("SERVER")
        while self.step < config["steps"]:
            count = server.call_rank0(Server.count, self.step).result()
            current_worker().report(self.step, count=count)
            draft = self.path.with_name(f"{self.path.name}.new")
            draft.write_text(json.dumps({"step": self.step}))
            draft.replace(self.path)
            if self.step % 10 == 0:
                print(f"rank {current_worker().rank} has saved step {self.step}", flush=True)
            self.step += 1
            time.sleep(0.02)


class Server:
    """Has a memory, which a start of the whole job empties."""

    def setup(self) -> None:
        self.calls = 0
        print(f"server starts, incarnation {current_worker().incarnation}, pid {os.getpid()}", flush=True)

    @rpc
    def count(self, step: int) -> int:
        self.calls += 1
        return self.calls


def build(steps: int) -> DLJob:
    builder = DLJobBuilder().config({"steps": steps}).device_type("CPU")
    builder.role("TRAINER").run(Trainer).total(2).per_node(int(os.environ.get("RANKS_PER_NODE", "2")))
    builder.role("SERVER").run(Server)
    return builder.build()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    build(parser.parse_args().steps).submit("again")
    print("the job has succeeded", flush=True)
