"""How fast does a job with torch start on this machine? Run it with nothing else running: python benchmarks/startup.py

Eight members in all, whose module imports torch. Three figures, each the median of ``ROUNDS`` rounds:

* ``import torch`` in a new interpreter: no start can be faster;
* from the zygote's readiness (torch is imported) until all members serve;
* from the command ``rlmesh launch`` until all members serve.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

MEMBERS = 8
ROUNDS = 3
WARM_GOAL_S, LAUNCH_GOAL_S = 0.3, 1.5
HERE = Path(__file__).resolve().parent


def submit() -> None:
    """The job's script."""
    from rlmesh import DLJobBuilder

    builder = DLJobBuilder().config({}).device_type("CPU")
    builder.role("ROLE").run("startup_role.Role").total(MEMBERS - 1).resource(cpu=0.1).not_driver()
    builder.role("DRIVER").run("startup_role.Driver").resource(cpu=0.1)
    result = builder.build().submit("bench-startup")
    status = result.status
    assert status.all_serving_s is not None
    ready = _zygote_ready_at((result.run_dir / "logs" / "agent-0.log").read_text())
    print("FIGURES", json.dumps({"serving_at": status.started_at + status.all_serving_s, "zygote_at": ready}))


def _zygote_ready_at(log: str) -> float:
    line = next(line for line in log.splitlines() if "the preloaded zygote" in line and "is ready" in line)
    found = re.match(r"(\S+ \S+?),(\d+)", line)
    assert found is not None
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(found[2]) / 1000


def import_torch_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def launch_s() -> tuple[float, float]:
    """Seconds from the zygote's readiness, and from the command, until all members serve."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "none", "--run-dir", f"{folder}/run"]
        began = time.time()
        done = subprocess.run([*words, __file__, "--submit"], env=env, cwd=folder, text=True, stdout=subprocess.PIPE,
                              check=True)  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("FIGURES"))
    figures = json.loads(line.removeprefix("FIGURES"))
    return figures["serving_at"] - figures["zygote_at"], figures["serving_at"] - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--submit", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    if options.submit:
        submit()
        return
    torch_s = statistics.median(import_torch_s() for _ in range(ROUNDS))
    warm, launched = zip(*(launch_s() for _ in range(ROUNDS)), strict=True)
    warm_s, launched_s = statistics.median(warm), statistics.median(launched)
    print(f"import torch                                    {torch_s:6.2f} s")
    print(f"zygote warm to all {MEMBERS} members serving          {warm_s:6.2f} s   goal {WARM_GOAL_S:.2f} s")
    print(f"rlmesh launch to all {MEMBERS} members serving        {launched_s:6.2f} s   "
          f"goal import torch + {LAUNCH_GOAL_S:.2f} s = {torch_s + LAUNCH_GOAL_S:.2f} s")  # fmt: skip
    if options.json is not None:
        figures = {"import_torch_s": torch_s, "warm_s": warm_s, "launch_s": launched_s}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
