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
from safetensors.torch import load_file
from torch import nn

from tests.examples.conftest import EXAMPLES

PROGRAM = Path(__file__).with_name("sharded.py")


def start(folder: Path, *, ranks: int, micro_batch_sizes: list[int], rows: int = 9) -> list[subprocess.Popen[str]]:
    """A process for each rank."""
    folder.mkdir()
    settings = {"ranks": ranks, "micro_batch_sizes": micro_batch_sizes, "rows": rows, "folder": str(folder)}
    root = EXAMPLES.parent
    path = os.pathsep.join(map(str, (EXAMPLES, root, root / "launcher")))
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps({**settings, "rank": rank})],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def flat(result: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(values).flatten() for values in result["weights"].values()])


@pytest.mark.case("O23")
@pytest.mark.timeout(300)
def test_one_rank_or_two_and_any_micro_batch_give_the_same_weights(tmp_path: Path) -> None:
    processes = [
        *start(tmp_path / "one", ranks=1, micro_batch_sizes=[100, 1]),
        *start(tmp_path / "two", ranks=2, micro_batch_sizes=[2]),  # 5 and 4 rows: three parts on both ranks
    ]
    try:
        outputs = [process.communicate(timeout=170)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0]
    results = [result for output in outputs for result in json.loads(output.splitlines()[-1])]

    whole, *others = results
    assert len(others) == 3
    for other in others:
        torch.testing.assert_close(flat(other), flat(whole), atol=1e-6, rtol=0)
        for a, b in zip(whole["statistics"], other["statistics"], strict=True):
            assert b == pytest.approx(a, abs=1e-6)

    assert all(result["goes_on"] for result in results)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain.load_state_dict(load_file(tmp_path / "two" / "micro-2" / "model.safetensors"))
    loaded = torch.cat([parameter.flatten() for parameter in plain.parameters()])
    torch.testing.assert_close(loaded.detach(), flat(others[-1]))
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"micro-2", "micro-2.again", "store"}
