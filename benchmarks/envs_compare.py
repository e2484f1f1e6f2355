"""rlmesh.envs beside Stable-Baselines3 and RLlib: sampling, PPO on CartPole-v1, replay, time to the first result.

python benchmarks/envs_compare.py [--peers-python .venv-peers/bin/python] [--rows A,B] [--seeds 5] [--json FILE]

The peers live in an environment of their own (benchmarks/envs_peers.txt); without one, only rlmesh is measured. Each
measurement is a process of its own, on one thread per process; all libraries take turns, seed by seed, so that other
load on the machine hits them alike. The table has medians, and the smallest and largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
LIMIT_S = 900


class EnvRow(NamedTuple):
    title: str
    key: str
    unit: str
    better: str
    peers: tuple[str, ...]
    goal: str


ROWS = {
    "sampling_16": EnvRow("sampling, one process x 16", "steps_per_s", "steps/s", "higher", ("sb3",), ">= 1.3 x"),
    "sampling_2x8": EnvRow("sampling, 2 runners x 8", "steps_per_s", "steps/s", "higher", ("rllib",), ">= 3 x"),
    "ppo_zoo": EnvRow("PPO to 475, SB3 zoo's settings", "seconds", "s", "lower", ("sb3",), "< 1 x"),
    "ppo_rllib": EnvRow("PPO to 475, RLlib's settings", "seconds", "s", "lower", ("rllib",), "<= 1/2 x"),
    "ppo_own": EnvRow("PPO to 475, own settings", "seconds", "s", "lower", (), "<= 2/3 of the fastest"),
    "dqn": EnvRow("DQN, CartPole to 195", "steps", "steps", "lower", ("sb3",), "<= 1.1 x"),
    "sac": EnvRow("SAC, Pendulum to -250", "steps", "steps", "lower", ("sb3",), "<= 1.1 x"),
    "td3": EnvRow("TD3, Pendulum to -250", "steps", "steps", "lower", ("sb3",), "<= 1.1 x"),
    "impala": EnvRow("IMPALA, CartPole to 150", "steps", "steps", "lower", ("rllib",), "<= 1.1 x"),
    "appo": EnvRow("APPO against PPO, 2 runners", "ratio", "x", "higher", (), ">= 1.2 x"),
    "replay": EnvRow("prioritised replay, 256 a round", "rounds_per_s", "rounds/s", "higher", ("rllib",), ">= 20 x"),
    "first_1": EnvRow("first result, one process", "seconds", "s", "lower", ("sb3", "rllib"), "<= 2 s"),
    "first_2": EnvRow("first result, 2 runners", "seconds", "s", "lower", ("rllib",), "<= 4 s"),
}


def measured(library: str, python: str, what: str, seed: int) -> dict[str, Any]:
    """One measurement in a process of its own; empty if it failed, with the reason on standard error."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    try:
        done = subprocess.run(
            [python, str(HERE / f"envs_{library}.py"), what, str(seed)], capture_output=True, text=True,
            timeout=LIMIT_S, env=variables,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        print(f"{library} {what} {seed}: {error!r}", file=sys.stderr)
        return {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=str(HERE.parent / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.rows.split(",")
    if unknown := sorted(set(wanted) - ROWS.keys()):
        parser.error(f"there is no row {unknown[0]!r}; the rows are {', '.join(ROWS)}")
    peers = Path(options.peers_python).exists()
    if not peers:
        print(f"{options.peers_python} is not there: rlmesh alone", file=sys.stderr)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for seed in range(options.seeds):
        for what in wanted:
            libraries = [("rlmesh", sys.executable)]
            libraries += [(peer, options.peers_python) for peer in ROWS[what].peers] if peers else []
            for library, python in libraries:
                found = measured(library, python, what, seed)
                results.setdefault(what, {}).setdefault(library, []).append(found)
                print(f"{what} {library} {seed}: {found}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """The results as text, one line per row and library."""
    lines = [f"{'':<34}{'':<9}{'median':>11} {'unit':<9}{'min … max':>22}  rlmesh : it  goal"]
    for what, by_library in results.items():
        row = ROWS[what]
        medians: dict[str, float] = {}
        for library, found in by_library.items():
            values = [each[row.key] for each in found if row.key in each]
            if not values:
                lines.append(f"{row.title:<34}{library:<9}{'failed':>11}")
                continue
            medians[library] = statistics.median(values)
            span = f"{min(values):,.1f} … {max(values):,.1f}"
            ratio = f"{medians['rlmesh'] / medians[library]:.2f}" if "rlmesh" in medians and library != "rlmesh" else ""
            missed = sum(not each.get("reached", True) for each in found)
            note = f"  ({missed} of {len(found)} did not get there)" if missed else ""
            lines.append(
                f"{row.title:<34}{library:<9}{medians[library]:>11,.1f} {row.unit:<9}{span:>22}  {ratio:>11}  "
                f"{row.goal if library == 'rlmesh' else ''}{note}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
