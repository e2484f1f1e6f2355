"""The kill grid: whom × when, each in a job of its own, and whether what happened is what the policy says.

``python benchmarks/chaos.py`` kills each of master, agent, TRAINER, an ACTOR rank, ROLLOUT and REWARD by SIGKILL at
the start, at a step, during a weight sync, during a checkpoint and at the shutdown. For each cell it compares the end
of the job with what the restart policy promises, and looks for what was left: processes, shared memory, sockets.

``--seed`` draws the step and the ranks; ``--policy never`` is the grid of jobs that restart nothing. Exit code 0: all
cells are as they should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rpc_processes import end_descendants, own_descendants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
JOB = HERE / "chaos_job.py"
MARK = "RLMESH_GRID_CELL"
TARGETS = ("master", "agent", "TRAINER", "ACTOR", "ROLLOUT", "REWARD")
POINTS = ("start", "step", "weight sync", "checkpoint", "shutdown")
POLICIES = ("never", "default")
LIMIT_S = 60.0
"""A job that is not over after this long hangs."""
GONE_S = 5.0
"""What is left of a job must be gone this long after its end."""
MASTER_RETURNS = (ROOT / "rlmesh" / "master" / "state" / "store.py").exists()
SIZES = {"ACTOR": 2, "ROLLOUT": 2}


@dataclass(frozen=True)
class Expected:
    """What the policy says: whether the job succeeds, and whom its error names if not."""

    succeeds: bool
    named: str = ""


@dataclass
class Cell:
    """One kill and what came of it. Empty lists are what one wants to see."""

    target: str
    point: str
    kill: str
    expected: str
    outcome: str = ""
    took_s: float = 0.0
    happened: bool = False
    hang: bool = False
    orphans: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.happened and not (self.hang or self.orphans or self.leaks or self.wrong)


def expected(policy: str, target: str, point: str) -> Expected:
    """What the documentation promises; see docs/failure-model.md.

    An agent is the parent of all on its node: with it the node ends, and with the only node the job. A master that
    keeps its state in a store is started again by its agent, whatever the restart policy of the roles; another one
    takes its job with it. What dies when the job is over anyway is not brought back; it is told.
    """
    if target == "agent":
        return Expected(False, "the agent of node")
    if target == "master":
        return Expected(True) if MASTER_RETURNS else Expected(False, "the master")
    named = f"{target}:"
    if policy == "never" or point == "shutdown":
        return Expected(False, named)
    return Expected(True)


def kill_for(target: str, point: str, source: random.Random) -> str:
    """The kill of one cell, as ``rlmesh launch --chaos`` takes it."""
    who = target if target not in SIZES else f"{target}:{source.randrange(SIZES[target])}"
    if point == "step":
        return f"{who}@step={source.randint(1, 4)}"
    if point == "weight sync":
        role = "ROLLOUT" if target != "ACTOR" else "ACTOR"
        return f"{who}@call={role}.{'load_weights' if role == 'ROLLOUT' else 'train'}"
    if point == "checkpoint":
        return (
            f"{who}@call={target if target == 'ROLLOUT' else 'ACTOR'}.{'generate' if target == 'ROLLOUT' else 'save'}"
        )
    return f"{who}@{point}"


def run_cell(cell: Cell, policy: str, want: Expected, folder: Path) -> None:
    """Run the job of a cell and fill in what came of it."""
    sockets = folder / "s"
    sockets.mkdir(mode=0o700)
    env = {
        **os.environ,
        MARK: folder.name,
        "XDG_RUNTIME_DIR": str(sockets),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}",
    }
    command = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", "--chaos", cell.kill]
    command += ["--run-dir", str(folder / "run"), *(["--restart", "never"] if policy == "never" else []), str(JOB)]
    command += ["--", "--name", folder.name]
    began = time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            cell.hang, code = True, -1
    cell.took_s = round(time.monotonic() - began, 2)
    if not cell.hang:
        await_gone(folder.name)
    cell.orphans = [] if cell.hang else list(marked(folder.name))
    end_marked(folder.name)
    if cell.hang:
        process.wait()
    cell.leaks = [f"/dev/shm/{name}" for name in shared_memory(folder.name)]
    cell.leaks += [str(path.relative_to(folder)) for path in sockets.iterdir()]
    judge(cell, want, code, folder)


def judge(cell: Cell, want: Expected, code: int, folder: Path) -> None:
    """Compare the end with what was expected."""
    output = (folder / "output").read_text(errors="replace")
    cell.outcome = {0: "succeeded", 1: "failed", -1: "hung"}.get(code, f"code {code}")
    cell.happened = (folder / "run" / "chaos.jsonl").exists()
    if not cell.happened:
        cell.wrong.append("the kill did not happen")
    if want.succeeds:
        if code != 0:
            cell.wrong.append(f"it should have succeeded: {first_cause(output)}")
        elif (result := read_result(folder)) != quiet_result():
            cell.wrong.append(f"the result is {result}")
        return
    if code == 0:
        cell.wrong.append("it should have failed")
    elif want.named not in first_cause(output):
        cell.wrong.append(f"its error should name {want.named} and says {first_cause(output)}")
    if code == 1 and not list((folder / "run" / "incidents").glob("*.txt")):
        cell.wrong.append("no incident was written")


def first_cause(output: str) -> str:
    lines = output.partition("First cause:")[2].strip().splitlines()
    return lines[0].strip() if lines else " / ".join(output.strip().splitlines()[-3:])


def read_result(folder: Path) -> object:
    try:
        return json.loads((folder / "run" / "result.json").read_text())
    except (OSError, ValueError):
        return None


def quiet_result() -> object:
    rewards = [float(sum(item * item for item in range(step, step + 8))) for step in range(6)]
    return {"step": 6, "rewards": rewards}


# What is left


def shared_memory(job_name: str) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").iterdir() if job_name in path.name)


def marked(cell: str) -> Iterable[str]:
    """Processes that carry the cell's mark in their environment, other than this one."""
    wanted = f"{MARK}={cell}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    yield f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:80]}"
        except OSError:
            continue


def await_gone(cell: str) -> None:
    deadline = time.monotonic() + GONE_S
    while any(True for _ in marked(cell)) and time.monotonic() < deadline:
        time.sleep(0.05)


def end_marked(cell: str) -> None:
    for process in list(marked(cell)):
        try:
            os.kill(int(process.split()[0]), signal.SIGKILL)
        except ProcessLookupError:
            continue


# The grid


def run_grid(options: argparse.Namespace) -> list[Cell]:
    source = random.Random(options.seed)
    cells = []
    for policy in options.policy:
        for target in TARGETS:
            for point in POINTS:
                kill = kill_for(target, point, source)
                want = expected(policy, target, point)
                says = "succeeds" if want.succeeds else f"fails, names {want.named}"
                cell = Cell(target, point, kill, f"{policy}: {says}")
                if options.only and not any(word in f"{policy} {target} {point}" for word in options.only):
                    continue
                with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as folder:
                    run_cell(cell, policy, want, Path(folder))
                    if not cell.good and options.keep:
                        os.system(f"cp -r {folder} {options.keep}/{policy}-{target}-{point.replace(' ', '-')}")
                cells.append(cell)
                if not options.json:
                    print(line_of(cell), flush=True)
    return cells


def line_of(cell: Cell) -> str:
    verdict = "ok  " if cell.good else "BAD "
    notes = [*cell.wrong, *(f"orphan: {o}" for o in cell.orphans), *(f"leak: {leak}" for leak in cell.leaks)]
    if cell.hang:
        notes.insert(0, f"hang: not over after {LIMIT_S:.0f} s")
    return f"{verdict} {cell.kill:32} {cell.expected:32} {cell.outcome:10} {cell.took_s:6.2f} s  {'; '.join(notes)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--only", nargs="+", help="cells whose policy, target or point has one of these words")
    parser.add_argument("--keep", metavar="DIR", help="copy the run directories of bad cells there")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of lines")
    options = parser.parse_args()
    own_descendants()
    try:
        cells = run_grid(options)
    finally:
        end_descendants()
    totals = {
        "cells": len(cells),
        "as the policy says": sum(not cell.wrong for cell in cells),
        "hangs": sum(cell.hang for cell in cells),
        "orphans": sum(len(cell.orphans) for cell in cells),
        "leaks": sum(len(cell.leaks) for cell in cells),
        "seed": options.seed,
    }
    if options.json:
        print(json.dumps({**totals, "grid": [asdict(cell) for cell in cells]}, indent=1))
    else:
        print(", ".join(f"{name}: {value}" for name, value in totals.items()))
    return 0 if all(cell.good for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
