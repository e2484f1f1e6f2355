"""Packed steps of the training engines on several ranks are those of one process in one pack."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rl.packed_ranks import build_engine, train

WITH_DEEPSPEED = [
    pytest.mark.engines,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'rlmesh[deepspeed]'"
    ),
]
KINDS = [
    ("ddp", 2),
    ("ddp+ckpt", 1),
    ("fsdp2", 3),
    ("fsdp2+ckpt", 2),
    *(pytest.param(f"zero{stage}", 2, marks=WITH_DEEPSPEED) for stage in (1, 2, 3)),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, all episodes in one pack."""
    engine = build_engine("ddp")
    seen = train(engine, 0, 1, token_budget=10_000)
    engine.close()
    return seen


@pytest.mark.case("O23")
@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_a_packed_step_does_not_depend_on_the_ranks(
    kind: str, ranks: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    commands = [
        [sys.executable, "-m", "tests.rl.packed_ranks", kind, str(rank), str(ranks), str(tmp_path)]
        for rank in range(ranks)
    ]
    running = [
        subprocess.Popen(
            command,
            cwd=root,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in running]
    assert [process.returncode for process in running] == [0] * ranks, "\n".join(outputs)[-4000:]
    found = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]
    log_probs: dict[Any, float] = {}
    for seen in found:
        assert seen["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert seen["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert seen["statistics"] == pytest.approx(alone["statistics"], rel=1e-4)
        assert not log_probs.keys() & seen["log_probs"].keys()
        log_probs.update(seen["log_probs"])
    # Of the second step, so after weights that all ranks have changed together.
    assert log_probs == pytest.approx(alone["log_probs"], abs=1e-3)
