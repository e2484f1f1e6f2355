"""Checkpoints of all training engines, whole and of adapters, that engines of other kinds and sizes go on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import checkpoint_ranks
from tests.engines.training_job import same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
FORMS = ["whole", *(["adapter"] if find_spec("peft") else [])]
WAIT_S = 200.0


def run_ranks(ranks: int, folder: Path, **plan: Any) -> list[list[dict[str, Any]]]:
    """What each rank saw of the checkpoints that it took."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT), *sys.path])
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.checkpoint_ranks", str(rank), str(ranks), str(folder),
             json.dumps(plan)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={
                **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * ranks, "\n".join(outputs)[-4000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]


def check(folder: Path, pairs: Sequence[tuple[str, str]], sizes: tuple[int, int]) -> None:
    """The first engine of each pair leaves checkpoints, and the second one goes on from them with another size."""
    left = list(product(dict.fromkeys(writer for writer, _ in pairs), FORMS))
    few, many = sizes
    run_ranks(few, folder / str(few), leave=left)
    for ranks, other, leaves in ((many, few, left), (few, many, [])):
        takes = [
            (reader, form, str(folder / str(other) / f"{writer}-{form}"))
            for (writer, reader), form in product(pairs, FORMS)
        ]
        for seen in run_ranks(ranks, folder / str(ranks), leave=leaves, take=takes):
            for (reader, form, place), taken in zip(takes, seen, strict=True):
                what = f"{reader} on {ranks} ranks from {place}"
                wrote = torch.load(Path(place) / checkpoint_ranks.SEEN, weights_only=False)
                assert taken["new"] == 0 and taken["steps"] == checkpoint_ranks.STEPS, what
                assert same(taken["weights"], wrote["saved"]) and same(taken["saved"], wrote["saved"]), what
                assert any((tensor - wrote["saved"][name]).abs().max() > 1e-4 for name, tensor in wrote["next"].items())
                for name, tensor in wrote["next"].items():
                    torch.testing.assert_close(taken["next"][name], tensor, rtol=0, atol=2e-4, msg=f"{what}: {name}")
                if len(FORMS) > 1 and not reader.startswith("zero"):
                    holds, trains = ("an adapter", "all weights")[:: 1 if form == "adapter" else -1]
                    assert f"holds {holds}, and this engine trains {trains}" in taken["refused"], what


def test_engines_of_torch_go_on_from_each_other(tmp_path: Path) -> None:
    kinds = ("ddp", "fsdp2")
    check(tmp_path, list(product(kinds, kinds)), (1, 3))


@pytest.mark.engines
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make engines)")
@pytest.mark.parametrize("after", [(2,), pytest.param((0, 1, 3, 4), marks=pytest.mark.soak)])
def test_all_engines_go_on_from_each_other(after: tuple[int, ...], tmp_path: Path) -> None:
    kinds = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
    pairs = [(kind, kinds[(place + each) % len(kinds)]) for place, kind in enumerate(kinds) for each in after]
    check(tmp_path, pairs, (1, 2))
