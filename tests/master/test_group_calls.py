"""A call to an elastic role goes to one generation of the group, or nowhere, whenever one of its ranks dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmesh.testing import LocalCluster
from tests.master import group_call_job


def run(tmp_path: Path, moments: int, seed: int) -> dict[str, Any]:
    out = tmp_path / "seen.json"
    with LocalCluster(run_root=tmp_path):
        group_call_job.build(out, moments, seed).submit("group-calls")
    seen: dict[str, Any] = json.loads(out.read_text())
    print(json.dumps(seen, indent=1))
    return seen


@pytest.mark.slow
@pytest.mark.case("n01")
def test_ranks_that_die_before_a_call_never_tear_it(tmp_path: Path) -> None:
    seen = run(tmp_path, 50, seed=12)
    assert seen["wrong"] == [] and seen["met"] == []
    assert sum(seen["seen"].values()) == 50


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.slow
@pytest.mark.case("n01")
def test_two_thousand_deaths_before_a_call_never_tear_it(tmp_path: Path) -> None:
    seen = run(tmp_path, 2000, seed=2000)
    assert seen["wrong"] == [] and seen["met"] == []
    assert sum(seen["seen"].values()) == 2000
