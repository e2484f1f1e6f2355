"""What a tracker costs a step: python benchmarks/trackers.py [--steps 400] [--rounds 6]

The same job runs without a tracker, and with one that raises from step 2 on and then blocks for 60 s at each report, in
turns. A step computes for a while and reports; its time is taken inside of the job. Printed are the medians of each
round, and the cost with the spread of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlmesh import BaseTrainer, DLJobBuilder, current_worker

TRACKER = "tests.observe.odd_trackers:Blocks60s"
ROOT = Path(__file__).resolve().parent.parent


class Steps(BaseTrainer):
    """Computes and reports."""

    def run(self) -> None:
        import time

        import numpy as np

        matrix = np.random.default_rng(0).normal(size=(256, 256))
        times = []
        for step in range(1, current_worker().job_info.user_config["steps"] + 1):
            began = time.perf_counter()
            for _ in range(15):
                matrix = np.tanh(matrix @ matrix / 256)
            time.sleep(0.01)
            current_worker().report(step=step, **{f"metric_{number}": step / 7 for number in range(40)})
            times.append(time.perf_counter() - began)
        (Path(current_worker().run_dir) / "times.json").write_text(json.dumps(times))


def median_s(steps: int, folder: Path, trackers: list[str]) -> float:
    words = [sys.executable, __file__, "--one", str(folder), "--steps", str(steps), *trackers]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run(words, check=True, capture_output=True, timeout=300, env=env)
    return float(statistics.median(json.loads((folder / "times.json").read_text())[20:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("trackers", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").config({"steps": options.steps})
        job = builder.role("TRAINER").run(Steps).resource(cpu=1).build()
        job.submit("steps", view="none", run_dir=options.one, trackers=options.trackers)
        return
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            order = [[], [TRACKER]] if number % 2 else [[TRACKER], []]
            found = {bool(one): median_s(options.steps, Path(folder) / f"{number}-{len(one)}", one) for one in order}
            costs.append(found[True] / found[False] - 1)
            print(
                f"without {found[False] * 1e3:6.2f} ms, with {found[True] * 1e3:6.2f} ms: {costs[-1]:+.1%}", flush=True
            )
    spread = f"{min(costs):+.1%} to {max(costs):+.1%}"
    print(f"cost of a step, median of the rounds: {statistics.median(costs):+.1%} ({spread})")


if __name__ == "__main__":
    main()
