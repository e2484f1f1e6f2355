"""The table of failures names tests and cells that exist; the grid itself, cell by cell."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "failure-model.md"
GRID = ROOT / "benchmarks" / "chaos.py"


def grid() -> ModuleType:
    sys.path.insert(0, str(GRID.parent))
    try:
        spec = importlib.util.spec_from_file_location("chaos_grid", GRID)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["chaos_grid"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(GRID.parent))
        sys.modules.pop("chaos_grid", None)


def test_every_row_is_proven_by_what_exists() -> None:
    text = DOC.read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 15
    for file, name in named:
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in functions, f"{file} has no {name}"
    cells = re.findall(r"grid: (\S+) × ([a-z ]+?)(?=[,|`]| \|)", text)
    module = grid()
    assert len(cells) >= 8
    for target, point in cells:
        assert target in module.TARGETS and point.strip() in module.POINTS, (target, point)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert all("::" in row or "grid:" in row for row in rows), "a row without a proof"


def test_the_grid_is_seeded() -> None:
    import random

    module = grid()
    kills = [
        [module.kill_for(target, point, source) for target in module.TARGETS for point in module.POINTS]
        for source in (random.Random(3), random.Random(3), random.Random(4))
    ]
    assert kills[0] == kills[1] != kills[2]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["never", "default"])
def test_no_kill_of_the_grid_ends_wrong_hangs_or_leaves_anything(policy: str, tmp_path: Path) -> None:
    command = [sys.executable, str(GRID), "--json", "--policy", policy, "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=tmp_path)
    found = json.loads(done.stdout)
    bad = [cell for cell in found["grid"] if cell["wrong"] or cell["hang"] or cell["orphans"] or cell["leaks"]]
    assert not bad, json.dumps(bad, indent=1)
    assert found["cells"] == 30 and done.returncode == 0
