"""A warm call stays short: the number of Python calls and modules that it runs through has a limit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.own_time import HANG_S

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "call_path.py"
MOST_CALLS = 100
MOST_MODULES = 15


def test_a_warm_call_runs_through_few_functions() -> None:
    made = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=HANG_S, check=True)
    match = re.search(r"(\d+) Python calls .* (\d+) modules of rlmesh in both", made.stdout)
    assert match is not None, made.stdout
    calls, modules = map(int, match.groups())
    assert 50 < calls <= MOST_CALLS, made.stdout
    assert 10 < modules <= MOST_MODULES, made.stdout
