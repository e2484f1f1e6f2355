"""One rank of a training engine with an adapter; writes down what it saw.

python -m tests.engines.lora_ranks KIND RANK RANKS FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmesh.rl.algorithms.protocol import Evaluated
from rlmesh.rl.components import Columns
from rlmesh.rl.engines.lora import LoraOptions
from rlmesh.rl.engines.training.packed import EMPTY, PackedBatch
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.rl.packing import pack
from tests.engines.training_job import make_engine
from tests.engines.training_model import build_policy
from tests.rl.episodes import VOCABULARY, padded
from tests.rl.packed_ranks import ALGORITHM, DRAWN, loss_of

OPTIONS = TrainingOptions(lr=0.01, max_grad_norm=0.5, weight_decay=0.1, lora=LoraOptions(rank=4, seed=3))


def engine_of(kind: str, seed: int = 3) -> Any:
    """The seed of the adapter; the base model is always the same."""
    checkpointed = kind.endswith("+ckpt")
    options = replace(OPTIONS, lora=LoraOptions(rank=4, seed=seed), activation_checkpointing=checkpointed)
    return make_engine(kind.removesuffix("+ckpt"), build_policy(vocabulary=VOCABULARY), options)


def steps(engine: Any, rank: int, ranks: int, count: int) -> list[float]:
    """Train on this rank's packs; the losses."""
    packs = pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=24, ranks=ranks).by_rank[rank]
    mask = padded([episode.mask for episode in DRAWN.episodes], fill=False)
    old = torch.full(mask.shape, -3.0, dtype=torch.float64)
    rows = len(DRAWN.groups)
    rewards = torch.arange(rows).double() % 4
    batch = Evaluated(mask, torch.tensor(DRAWN.groups), rewards, torch.ones(rows, dtype=torch.bool), old, old)
    weights = ALGORITHM.weigh(batch)
    columns = [Columns.of(one, batch, weights, "cpu", torch.float32) for one in [*packs, EMPTY]]
    loss = partial(loss_of, weights=weights)
    return [engine.train_step(PackedBatch(packs, columns[:-1], columns[-1]), loss).loss for _ in range(count)]


def tensors_of(engine: Any, lora: Any = None) -> dict[str, torch.Tensor]:
    source = engine.named_tensors(lora=lora)
    names = [spec.name for spec in source.manifest()]
    with source.gather(names) as whole:
        return {name: whole[name].detach().clone() for name in names}


def exercise(kind: str, rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Train, save, go on; another engine goes on from what was saved."""
    engine = engine_of(kind)
    seen: dict[str, Any] = {"start": tensors_of(engine), "losses": steps(engine, rank, ranks, 2)}
    seen["adapter"], seen["merged"] = tensors_of(engine), tensors_of(engine, "merged")
    engine.save(folder / "saved").result(60)
    engine.export(folder / "merged")
    engine.export(folder / "adapter", adapter_only=True)
    steps(engine, rank, ranks, 1)
    seen["next"] = tensors_of(engine)
    engine.close()
    other = engine_of(kind, seed=9)
    other.load(folder / "saved")
    seen["loaded"], seen["steps"] = tensors_of(other), other.steps
    steps(other, rank, ranks, 1)
    seen["goes on"] = tensors_of(other)
    other.offload()
    other.reload()
    seen["reloaded"] = tensors_of(other)
    other.close()
    return seen


def main(kind: str, rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    try:
        torch.save(exercise(kind, rank, ranks, folder), folder / f"rank-{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
