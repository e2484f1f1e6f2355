"""Do jobs that start at the same moment get in each other's way? python benchmarks/storm.py [--json]

``JOBS`` jobs of four processes each are launched at once, ``ROUNDS`` times over, while somebody else holds the ports
that everybody guesses (29500, and rlmesh's own default). Three of the four processes meet at the port that was
reserved for their group; whoever meets a process of another job fails its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc

JOBS, ROUNDS = 8, 5
RANKS = 3
LIMIT_S = 120.0


class Rank:
    """Rank 0 listens where a process group's store would, the others connect there; nobody tries twice."""

    def setup(self) -> None:
        self.where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @rpc
    def listen(self) -> None:
        self.server = socket.create_server(self.where)

    @rpc(concurrent=2)
    def answer(self, count: int) -> None:
        with self.server:
            self.server.settimeout(30.0)
            for _ in range(count):
                with self.server.accept()[0] as peer:
                    peer.sendall(current_worker().job_info.job_id.encode())

    @rpc
    def ask(self) -> bool:
        with socket.create_connection(self.where, 30.0) as peer, peer.makefile("rb") as stream:
            return stream.read().decode() == current_worker().job_info.job_id


class Trainer:
    def run(self) -> None:
        group = RoleGroup("RANK")
        group[0].call("listen").result()
        served = group[0].call("answer", RANKS - 1)
        met = group[1:].call("ask").result()
        served.result()
        assert met == [True] * (RANKS - 1), f"another job's process was met: {met}"


def submit() -> None:
    """One job's script."""
    builder = DLJobBuilder().config({}).device_type("CPU")
    builder.role("RANK").train(Rank).nnodes(1).nproc_per_node(RANKS).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    builder.build().submit("storm")


def storm(folder: Path) -> list[str]:
    """One round; of each job that did not succeed what it said."""
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'launcher'}"}
    failed = []
    with ExitStack() as stack:
        jobs = []
        for number in range(JOBS):
            run_dir = folder / str(number)
            command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "none", "--run-dir", str(run_dir)]
            jobs.append(stack.enter_context(subprocess.Popen(
                [*command, __file__, "--submit"], cwd=folder, env=env, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )))  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        for job in jobs:
            try:
                output, _ = job.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.terminate()
                output = f"it did not end within {LIMIT_S:g} s\n{job.communicate()[0]}"
            if job.returncode != 0 or "in use" in output:
                failed.append(output)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--submit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.submit:
        submit()
        return 0
    from rlmesh.master.rendezvous import DEFAULT_PORT

    failed: list[str] = []
    rounds_s = []
    with ExitStack() as stack:
        for port in (29500, DEFAULT_PORT):
            with suppress(OSError):  # somebody else has it indeed
                stack.enter_context(socket.create_server(("", port)))
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                failed += storm(Path(folder))
                rounds_s.append(round(time.monotonic() - began, 2))
    for output in failed:
        print(output, file=sys.stderr)
    started = JOBS * ROUNDS - len(failed)
    if options.json:
        print(json.dumps({"jobs": JOBS * ROUNDS, "succeeded": started, "rounds_s": rounds_s}))
    else:
        print(f"{started} of {JOBS * ROUNDS} jobs of {RANKS + 1} processes, {JOBS} at once; rounds of {rounds_s} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
