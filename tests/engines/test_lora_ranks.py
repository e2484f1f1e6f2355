"""Adapters in all training engines, on one and two ranks: the same adapter, checkpoint and export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import lora_ranks
from tests.engines.test_training_engines import WITH_DEEPSPEED
from tests.engines.training_model import build_policy
from tests.rl.episodes import VOCABULARY

pytest.importorskip("peft", reason="peft is not installed: pip install 'rlmesh[lora]'")

# torch says so whenever a process is alone.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
]
ROOT = Path(__file__).resolve().parents[2]
KINDS = [
    ("ddp", 2),
    ("fsdp2", 2),
    ("fsdp2+ckpt", 1),
    *(pytest.param(f"zero{stage}", 2, marks=WITH_DEEPSPEED) for stage in (1, 2, 3)),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, the plain model."""
    return lora_ranks.exercise("ddp", 0, 1, tmp_path_factory.mktemp("alone"))


def ranks_of(kind: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.lora_ranks", kind, str(rank), str(ranks), str(folder)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={
                **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200)[0] for process in running]
    assert [process.returncode for process in running] == [0] * ranks, "\n".join(outputs)[-4000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]


def close(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float) -> None:
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol)


@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_every_engine_trains_the_same_adapter(kind: str, ranks: int, alone: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for seen in ranks_of(kind, ranks, tmp_path):
        close(seen["start"], alone["start"], 0)
        assert seen["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        for moment in ("adapter", "next"):
            close(seen[moment], alone[moment], 2e-4)
        close(seen["merged"], alone["merged"], 2e-4)
        assert all("lora_" in name for name in seen["adapter"]) and not any("lora_" in name for name in seen["merged"])
        assert any((seen["next"][name] - seen["start"][name]).abs().max() > 1e-3 for name in seen["start"])
        # The checkpoint has the moment of saving, and training goes on from it as if nothing had been.
        assert seen["steps"] == 2
        close(seen["loaded"], seen["adapter"], 0)
        close(seen["goes on"], seen["next"], 1e-7)
        close(seen["reloaded"], seen["goes on"], 0)
    names = {name for _, name in written(tmp_path / "saved")}
    assert names and not any(part in name for part in ("base_layer", "embed", "lm_head") for name in names)
    base = build_policy(vocabulary=VOCABULARY)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    added = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(12).unsqueeze(0) % VOCABULARY
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, added(input_ids=ids).logits, rtol=0, atol=1e-5)


def written(folder: Path) -> list[tuple[str, str]]:
    """(file, tensor) of all tensors in the current checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    (data,) = folder.glob("step-*")
    return [(data.name, name) for name in FileSystemReader(data).read_metadata().state_dict_metadata]
