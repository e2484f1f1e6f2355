"""Weight sync into vLLM: from the push until two engines serve the new weights.

python benchmarks/engines.py          the rows below; needs vLLM (make engines)

Engines are two processes, the source a third, who pushes a fourth; a model of 0.34 million parameters in float32, so
that what is measured is all but the bytes: pausing, vLLM's own loading and packing, caches, the probe, two phases.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launcher"), str(ROOT / "benchmarks")]

from rlmesh import DLJobBuilder  # noqa: E402
from rlmesh.testing import LocalCluster  # noqa: E402

ROWS = [
    ("2 idle engines in their processes, untied", {"kind": "sync", "tied": False, "requests": 0}, 30.0),
    ("2 idle engines in their processes, tied", {"kind": "sync", "tied": True, "requests": 0}, 30.0),
    ("2 AsyncLLM with 16 running requests each", {"kind": "async", "tied": False, "requests": 16}, 80.0),
    ("2 engines in their processes, 16 running requests each", {"kind": "sync", "tied": False, "requests": 16}, None),
]


def measure(options: dict[str, Any], pushes: int) -> dict[str, Any]:
    import engines_job

    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        folder, out = Path(directory) / "model", Path(directory) / "out.json"
        engines_job.tiny(0, tied=options["tied"]).save_pretrained(folder)
        values = {**options, "model": str(folder), "out": str(out), "pushes": pushes}
        builder = DLJobBuilder().config(values).device_type("CPU")
        builder.role("ACTOR").run(engines_job.Actor).resource(cpu=0)
        builder.role("ROLLOUT").run(engines_job.Rollout).total(2).resource(cpu=0)
        builder.role("TRAINER").run(engines_job.Trainer).resource(cpu=0)
        with LocalCluster(run_root=Path(directory)):
            builder.build().submit("engines")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=40)
    parser.add_argument("--row", type=int, action="append", help="only this one, from 0; may be given several times")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.write(f"{os.cpu_count()} cores, Python {platform.python_version()}\n")
    for number, (name, options, goal) in enumerate(ROWS):
        if args.row and number not in args.row:
            continue
        found = measure(options, args.pushes)
        samples = found.get("samples")
        rest = f"; samples, of several versions, tokens per engine: {samples}" if samples else ""
        limit = f", goal {goal:g}" if goal else ""
        sys.stdout.write(
            f"{name}: push to committed, median {found['median_ms']:.1f} ms{limit} (95 %: {found['p95_ms']:.1f}; "
            f"staged after {found['staged_ms']:.1f}; {found['pushes']} pushes){rest}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
