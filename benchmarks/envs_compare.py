"""rlmesh.envs beside Stable-Baselines3, RLlib, CleanRL, TorchRL, PufferLib and EnvPool.

python benchmarks/envs_compare.py --json FILE [--peers-python .venv-envs-peers/bin/python] [--rows A,B] [--seeds 5]

The peers live in an environment of their own, which `make bench-envs` makes; without one, only rlmesh is measured.
Each measurement is a process of its own, with one thread, in an empty folder. All libraries take turns, seed by seed,
so that other load on the machine hits them alike. The file is written after each measurement. The same command again
goes on where it ended: it measures what the file has not, what failed, and what stopped at a lower limit.

The table has medians, the smallest and the largest value, the ratio to each peer, and whether each goal is met. A
training that stopped before its goal counts as longer than all others; ">" is before a median that is such a one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from envs_results import Results
from envs_rows import ROWS
from envs_table import table
from envs_tries import measured

HERE = Path(__file__).resolve().parent
RLMESH = "rlmesh"


def pairs(rows: list[str], seeds: int, libraries: set[str]) -> list[tuple[int, str, str]]:
    """``(seed, row, library)`` of all measurements, in their order."""
    return [
        (seed, name, library)
        for seed in range(seeds)
        for name in rows
        for library in (RLMESH, *ROWS[name].peers, *ROWS[name].beside)
        if library in libraries
    ]


def go_on(
    results: Results, todo: list[tuple[int, str, str]], limits: dict[str, float], minutes: float | None,
    measure: Callable[[str, str, int, float], dict[str, object]],
) -> None:  # fmt: skip
    """Measures what ``results`` lack, and begins none after ``minutes``."""
    began = time.monotonic()
    for at, (seed, name, library) in enumerate(todo):
        if results.has(name, library, seed, limits[name]):
            continue
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            print(f"{minutes:g} minutes are over: {len(todo) - at} measurements were not looked at", file=sys.stderr)
            return
        load, since = os.getloadavg()[0], time.monotonic()
        found = {**measure(name, library, seed, limits[name]), "load": round(load, 1), "limit_s": limits[name]}
        found["took_s"] = round(time.monotonic() - since, 1)
        results.add(name, library, seed, found)
        print(f"[{at + 1}/{len(todo)}] {name} {library} {seed}: {found}", file=sys.stderr, flush=True)


def parsed() -> tuple[argparse.Namespace, list[str], set[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=str(HERE.parent / ".venv-envs-peers" / "bin" / "python"))
    parser.add_argument("--rows", default=",".join(ROWS), help=f"default: all, {', '.join(ROWS)}")
    parser.add_argument("--libraries", help="measure only these, separated by commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, help="seconds that a training may take, in place of its row's limit")
    parser.add_argument("--minutes", type=float, help="begin no measurement after so many minutes")
    parser.add_argument("--json", type=Path, help="the file of the results: read, continued, written")
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    options = parser.parse_args()
    rows = options.rows.split(",")
    if unknown := sorted(set(rows) - ROWS.keys()):
        parser.error(f"there is no row {unknown[0]!r}; the rows are {', '.join(ROWS)}")
    known = {RLMESH, *(each for row in ROWS.values() for each in (*row.peers, *row.beside))}
    libraries = set(options.libraries.split(",")) if options.libraries else known
    if unknown := sorted(libraries - known):
        parser.error(f"there is no library {unknown[0]!r}; the libraries are {', '.join(sorted(known))}")
    if options.table and (options.json is None or not options.json.exists()):
        parser.error("--table prints the results of a file: name one that exists by --json")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1")
    if not options.table and not Path(options.peers_python).exists():
        print(f"{options.peers_python} is not there: rlmesh alone", file=sys.stderr)
        libraries &= {RLMESH}
    return options, rows, libraries


def main() -> None:
    options, rows, libraries = parsed()
    try:
        results = Results(options.json)
    except ValueError as error:
        sys.exit(str(error))

    def measure(name: str, library: str, seed: int, limit_s: float) -> dict[str, object]:
        python = sys.executable if library == RLMESH else options.peers_python
        return measured([python, str(HERE / f"envs_{library}.py"), name, str(seed), str(limit_s)], limit_s)

    if not options.table:
        limits = {name: options.limit_s or ROWS[name].limit_s for name in rows}
        try:
            go_on(results, pairs(rows, options.seeds, libraries), limits, options.minutes, measure)
        except KeyboardInterrupt:
            print("interrupted: this is the table so far", file=sys.stderr)
    print(table(results.measured))


if __name__ == "__main__":
    main()
