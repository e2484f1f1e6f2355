"""Durations follow clocks that nobody sets: where the wall clock is read, there is a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "datetime.datetime.now"}
WALL_NAMES = {name.rpartition(".")[2] for name in WALL}
FILE_TIMES = {"st_mtime", "st_ctime", "st_atime", "getmtime", "getctime", "getatime"}
MAY_READ = re.compile("|".join((r"\bfrom time import\b", r"\btime\.time", r"\bdatetime\b", *FILE_TIMES)))
"""Text that each module has in which `wall_clock_reads` finds something."""
READ_FOR = {
    "rlmesh/runtime/process/clock.py": "sets the job's own time, once",
    "rlmesh/run_directory/starts.py": "says to people since when a run directory is held",
    "rlmesh/master/state/store.py": "says to people when a store was made, and names one that was put aside",
    "rlmesh/rendezvous/server.py": "compares the wall clocks of nodes, which is what is asked",
    "rlmesh/rendezvous/preflight.py": "compares the wall clocks of nodes, which is what is asked",
    "rlmesh/drafts.py": "finds drafts of other hosts that have not changed for an hour by the file system's clock",
    "rlmesh/agent/machine_checks.py": "says whether the wall clock is set",
    "rlmesh/rl/rollout/endpoint/openai_answers.py": "says when an answer was made, as OpenAI's endpoint does",
    "rlmesh/observe/files/tensorboard.py": "names a file, as TensorBoard does",
    "rlmesh/cli/commands/status.py": "says to people how long ago a job that has ended restarted a member",
    "rlmesh/run_directory/records.py": "says to people when a job that left no end was started",
    "launcher/rlmesh_launcher/slurm_rendezvous.py": "removes files that are a week old",
}
"""Each file that reads the wall clock or a file's time, and what for; never for a duration that decides anything."""


def modules() -> list[Path]:
    return [path for folder in ("rlmesh", "launcher") for path in sorted((ROOT / folder).rglob("*.py"))]


def wall_clock_reads(tree: ast.AST) -> Iterator[int]:
    """Lines at which a module reads the wall clock or a file's time, or hands such a clock on."""
    bare = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for alias in node.names
        if alias.name in ("time", "time_ns")
    }
    for node in ast.walk(tree):
        reads = isinstance(node, ast.Attribute) and (
            node.attr in FILE_TIMES or (node.attr in WALL_NAMES and ast.unparse(node) in WALL)
        )
        if reads or (isinstance(node, ast.Name) and node.id in bare and isinstance(node.ctx, ast.Load)):
            yield getattr(node, "lineno", 0)


@pytest.mark.case("a05")
def test_the_wall_clock_is_read_for_people_alone() -> None:
    reads = {}
    for path in modules():
        text = path.read_text()
        # Most modules have none of the words, and to parse all takes seconds.
        if MAY_READ.search(text) and (lines := list(wall_clock_reads(ast.parse(text)))):
            reads[str(path.relative_to(ROOT))] = lines
    new = {name: lines for name, lines in reads.items() if name not in READ_FOR}
    assert not new, (
        f"{new}: use rlmesh.runtime.process.clock.now() for durations and clock.epoch() for times that people read; "
        "if people read the wall clock here, say so in READ_FOR"
    )
    assert set(READ_FOR) <= set(reads), "these read no wall clock any more"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import time\nx = time.time() - y", [2]),
        ("import time\ndef f(clock=time.time): ...", [2]),
        ("from time import time\nx = time()", [2]),
        ("from datetime import datetime\nx = datetime.now()", [2]),
        ("age = now - path.stat().st_mtime", [1]),
        ("import time\nx = time.monotonic()", []),
    ],
)
def test_reads_of_the_wall_clock_are_recognised(text: str, lines: list[int]) -> None:
    assert list(wall_clock_reads(ast.parse(text))) == lines
    assert MAY_READ.search(text) or not lines
