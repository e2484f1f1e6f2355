"""The actor's and critic's training is the same however the batch is split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.examples.conftest import EXAMPLES

PROGRAM = Path(__file__).with_name("sharded.py")


def train(tmp_path: Path, *, ranks: int, micro_batch_size: int, rows: int = 9) -> list[dict[str, Any]]:
    """What each rank prints."""
    folder = tmp_path / f"{ranks}-{micro_batch_size}"
    folder.mkdir()
    settings = {
        "ranks": ranks,
        "micro_batch_size": micro_batch_size,
        "rows": rows,
        "store": str(folder / "store"),
        "checkpoint": str(folder / "model.pt"),
    }
    root = EXAMPLES.parent
    path = os.pathsep.join(map(str, (EXAMPLES, root, root / "launcher")))
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps({**settings, "rank": rank})],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def flat(result: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(values).flatten() for values in result["weights"].values()])


@pytest.mark.case("O23")
def test_one_rank_or_two_and_any_micro_batch_give_the_same_weights(tmp_path: Path) -> None:
    (whole,) = train(tmp_path, ranks=1, micro_batch_size=100)
    (one_by_one,) = train(tmp_path, ranks=1, micro_batch_size=1)
    two = train(tmp_path, ranks=2, micro_batch_size=2)  # 5 and 4 rows: three micro-batches on both ranks
    for other in (one_by_one, *two):
        torch.testing.assert_close(flat(other), flat(whole), atol=1e-6, rtol=0)
        for a, b in zip(whole["statistics"], other["statistics"], strict=True):
            assert b == pytest.approx(a, abs=1e-6)

    saved = torch.load(tmp_path / "2-2" / "model.pt", weights_only=True)
    assert saved["step"] == 2
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain.load_state_dict(saved["model"])
    loaded = torch.cat([parameter.flatten() for parameter in plain.parameters()])
    torch.testing.assert_close(loaded.detach(), flat(two[0]))
    assert {path.name for path in (tmp_path / "2-2").iterdir()} == {"model.pt", "store"}
