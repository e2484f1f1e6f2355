"""The programs of docs/writing-a-job.md run as they stand there, and say what the page says."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlmesh.testing import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "writing-a-job.md"
FILES = dict(re.findall(r"^`([\w.]+\.py)`\n\n```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def bandit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("bandit")
    for name in ("bandit", "test_bandit"):
        sys.modules.pop(name, None)


def printed(folder: Path, *words: str) -> str:
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_bandit_learns_when_it_is_launched(folder: Path) -> None:
    out = printed(folder, "-m", "rlmesh.cli.main", "launch", "bandit.py", "--", "--steps", "20")
    (reward,) = re.findall(r"mean reward of the last step: (\S+)", out)
    assert float(reward) > 0.7  # sampling at random pays 0.375


DEATH = """
    def step(self, step):
        name, rank = {7: ("ACTOR", 1), 8: ("ROLLOUT", 0), 9: ("TRAINER", 0)}.get(step, ("", 0))
        if name and not Path(f"killed-{name}").exists():
            Path(f"killed-{name}").touch()
            pid = os.getpid() if name == "TRAINER" else RoleGroup(name)[rank].call("pid").result()
            os.kill(pid, 9)
"""


@pytest.mark.slow
@pytest.mark.case("n02")
def test_members_of_the_bandit_that_die_cost_nothing_but_steps(folder: Path) -> None:
    """It ends with the policy that it has when nobody dies."""
    pid = "    @rpc\n    def pid(self):\n        return os.getpid()\n\n    @rpc\n"
    deadly = FILES["bandit.py"].replace("    @rpc\n", pid, 2).replace("\n    def step(self, step):\n", DEATH)
    (folder / "deadly.py").write_text(deadly)
    policies = []
    for name in ("bandit", "deadly"):
        run = folder / f"run-{name}"
        printed(folder, "-m", "rlmesh.cli.main", "launch", "--run-dir", str(run), f"{name}.py", "--", "--steps", "10")
        with np.load(run / "policy.npz") as saved:
            policies.append((int(saved["step"]), saved["logits"]))
    assert sorted(path.name for path in folder.glob("killed-*")) == ["killed-ACTOR", "killed-ROLLOUT", "killed-TRAINER"]
    assert policies[0][0] == policies[1][0] == 10
    np.testing.assert_allclose(policies[1][1], policies[0][1], rtol=1e-5)


@pytest.mark.slow
def test_the_pole_is_balanced(folder: Path) -> None:
    pytest.importorskip("gymnasium")
    (found,) = re.findall(r"mean return (\d+)", printed(folder, "poles.py"))
    assert int(found) > 100  # random policies last for 25 steps or so


def test_its_tests_pass(bandit: ModuleType) -> None:
    tests: Any = importlib.import_module("test_bandit")
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        getattr(tests, name)()


@pytest.mark.slow
def test_its_job_runs_in_a_loop_and_on_several_nodes(bandit: ModuleType, folder: Path) -> None:
    (snippet,) = re.findall(r"```python\n(async with .*?)```", PAGE.read_text(), re.DOTALL)
    body = "".join(f"    {line}\n" for line in snippet.replace("steps=30", "steps=2").splitlines())
    names: dict[str, Any] = {"build": bandit.build}
    exec(f"async def main():\n{body}    return result", names)
    with LocalCluster(nodes=2, devices_per_node=2, run_root=folder / "runs"):
        result = asyncio.run(names["main"]())
    assert len((result.run_dir / "metrics.jsonl").read_text().splitlines()) == 2


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text())
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
