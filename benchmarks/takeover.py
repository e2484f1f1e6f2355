"""Does a job notice that its master was killed? Run it with nothing else running: python benchmarks/takeover.py

The PPO example runs on while its master is killed by SIGKILL, once after each of the steps in ``AT_STEPS``. For each
kill it tells the time from the signal until the next master has the node and its members again, by the job's own
records. No step may be lost or be done twice, and every member must be the process that it was.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 14
AT_STEPS = (3, 6, 9)
GOAL_S = 2.0
LIMIT_S = 240.0


def run(folder: Path) -> Path:
    """Run the job; its run directory."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "none", "--run-dir", str(run_dir)]
    for step in AT_STEPS:
        command += ["--chaos", f"master@step={step}"]
    command += [str(ROOT / "examples" / "ppo" / "main.py"), "--", "--job_name", "takeover", "--steps", str(STEPS)]
    subprocess.run(
        command, check=True, cwd=folder, stdin=subprocess.DEVNULL, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"},
    )  # fmt: skip
    return run_dir


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(run_dir: Path) -> dict[str, Any]:
    """What the job's records say."""
    events = read(run_dir / "events.jsonl")
    killed = [entry["at"] for entry in read(run_dir / "chaos.jsonl") if "kill" in entry]
    returned = [entry["at"] for entry in events if entry["event"] == "AgentRegistered"]
    away_s = [min(at for at in returned if at > kill) - kill for kill in killed]
    steps = [entry["step"] for entry in read(run_dir / "metrics.jsonl") if entry["role"] == "TRAINER"]
    bound = [entry["who"] for entry in events if entry["event"] == "MemberBound"]
    return {
        "kills": len(killed),
        "adopted_s": round(statistics.median(away_s), 3),
        "adopted_worst_s": round(max(away_s), 3),
        "steps_as_undisturbed": steps == list(range(steps[0], STEPS + 1)),
        "members_unchanged": len(bound) == len(set(bound)) and not any(e["event"] == "TellRestart" for e in events),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = figures(run(Path(folder)))
    good = seen["adopted_worst_s"] <= GOAL_S and seen["steps_as_undisturbed"] and seen["members_unchanged"]
    if options.json:
        print(json.dumps(seen))
    else:
        print(f"master killed {seen['kills']} times in {STEPS} steps of PPO: adopted after {seen['adopted_s']:.2f} s "
              f"(goal {GOAL_S:.0f} s), worst {seen['adopted_worst_s']:.2f} s")  # fmt: skip
        print(f"each step once: {seen['steps_as_undisturbed']}, members unchanged: {seen['members_unchanged']}")
    return 0 if good and seen["kills"] == len(AT_STEPS) else 1


if __name__ == "__main__":
    sys.exit(main())
