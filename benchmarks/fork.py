"""What rlmesh adds to children that a member forks: python benchmarks/fork.py

The same children (`Process`, `Pool`, `ProcessPoolExecutor`, a `DataLoader` where there is torch, `subprocess` with a
``preexec_fn``, plain ``os.fork``) in a plain program and in a member, in turns; medians and exit codes. The last column
is to stay below 10 ms.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlmesh import DLJobBuilder, current_worker

TIMES = 5
"""Children of each kind, in each turn."""
fork = multiprocessing.get_context("fork")


def square(x: int) -> int:
    return x * x


def process() -> int:
    child = fork.Process(target=square, args=(3,))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def pool() -> int:
    workers = fork.Pool(2)
    assert workers.map(square, range(4)) == [0, 1, 4, 9]
    workers.close()
    workers.join()
    started: list[Any] = workers._pool  # type: ignore[attr-defined]
    return max(abs(int(worker.exitcode)) for worker in started)


def executor() -> int:
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as workers:
        assert list(workers.map(square, range(4))) == [0, 1, 4, 9]
        started = list(workers._processes.values())
    return max(abs(worker.exitcode or 0) for worker in started)


def loader() -> int:
    import torch
    from torch.utils.data import DataLoader

    data: Any = DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)  # type: ignore[arg-type]
    assert sum(float(batch.sum()) for batch in data) == 28.0
    return 0


def program() -> int:
    return subprocess.run(["/bin/true"], preexec_fn=lambda: None).returncode


def plain() -> int:
    if (pid := os.fork()) == 0:
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


KINDS: dict[str, Callable[[], int]] = {
    "Process": process,
    "Pool": pool,
    "ProcessPoolExecutor": executor,
    "subprocess, preexec_fn": program,
    "os.fork": plain,
}
if find_spec("torch") is not None:
    KINDS["DataLoader"] = loader

Measured = dict[str, tuple[list[float], list[int]]]


def measure() -> Measured:
    """By kind: seconds, and exit codes."""
    measured: Measured = {}
    for name, work in KINDS.items():
        work()
        seconds, codes = [], []
        for _ in range(TIMES):
            began = time.perf_counter()
            codes.append(work())
            seconds.append(time.perf_counter() - began)
        measured[name] = (seconds, codes)
    return measured


class Member:
    def run(self) -> None:
        Path(current_worker().job_info.user_config).write_text(json.dumps(measure()))


def in_a_member(folder: Path) -> Measured:
    out = folder / "out.json"
    job = DLJobBuilder().config(str(out)).role("MEMBER").run(Member).build()
    job.submit("fork", view="none", run_dir=folder / "run")
    measured: Measured = json.loads(out.read_text())
    return measured


def in_a_program() -> Measured:
    done = subprocess.run([sys.executable, __file__, "--only"], capture_output=True, text=True, check=True)
    measured: Measured = json.loads(done.stdout)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="of both, one after the other")
    parser.add_argument("--only", action="store_true", help="print the figures of this program itself, as JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure()))
        return 0
    both: tuple[list[Measured], list[Measured]] = ([], [])
    for _ in range(options.turns):
        both[0].append(in_a_program())
        with tempfile.TemporaryDirectory() as folder:
            both[1].append(in_a_member(Path(folder)))
    print(f"{'ms, medians':24}{'plain':>9}{'member':>9}{'added':>9}  exit codes")
    worst = 0.0
    for name in KINDS:
        plain_s, member_s = (statistics.median(s for turn in turns for s in turn[name][0]) for turns in both)
        codes = [sorted({code for turn in turns for code in turn[name][1]}) for turns in both]
        worst = max(worst, member_s - plain_s)
        times = "".join(f"{1e3 * s:9.1f}" for s in (plain_s, member_s, member_s - plain_s))
        print(f"{name:24}{times}  {codes[0]} {codes[1]}")
    return int(worst > 0.010)


if __name__ == "__main__":
    sys.exit(main())
