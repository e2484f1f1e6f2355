"""One rank of a packed training step: ``python -m tests.rl.packed_ranks KIND RANK RANKS FOLDER``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmesh.rl.algorithms import GRPO, Evaluated, TokenWeights
from rlmesh.rl.components import Columns, policy_share
from rlmesh.rl.engines.training.packed import EMPTY, PackedBatch, PackedPart
from rlmesh.rl.engines.training.protocol import TrainingEngine, TrainingOptions
from rlmesh.rl.packing import pack
from tests.engines.training_model import build_policy
from tests.rl.episodes import VOCABULARY, episodes_of, padded

ALGORITHM = GRPO(samples=3, loss="dapo", entropy=0.01)
DRAWN = episodes_of([(3, [4, 0, 7]), (9, [5, 11, 3]), (5, [1, 2, 2]), (2, [6, 6, 1])], 11)


def build_engine(kind: str) -> TrainingEngine:
    options = TrainingOptions(lr=0.05, max_grad_norm=0.5, activation_checkpointing=kind.endswith("+ckpt"))
    kind = kind.removesuffix("+ckpt")
    if kind == "ddp":
        from rlmesh.rl.engines.training.ddp import DDPEngine

        return DDPEngine(build_policy(vocabulary=VOCABULARY), options)
    if kind == "fsdp2":
        from rlmesh.rl.engines.training.fsdp2 import FSDP2Engine

        return FSDP2Engine(build_policy(vocabulary=VOCABULARY), options)
    from rlmesh.rl.engines.training.zero import DeepSpeedEngine

    return DeepSpeedEngine(build_policy(vocabulary=VOCABULARY), options, stage=int(kind[-1]))  # type: ignore[arg-type]


def loss_of(model: Any, part: PackedPart, *, weights: TokenWeights) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    terms = model(packed=part.inputs)
    return policy_share(terms, part.columns, weights.normalisers, ALGORITHM)


def train(engine: TrainingEngine, rank: int, ranks: int, token_budget: int) -> dict[str, Any]:
    """Two steps on this rank's packs; what was seen."""
    packs = pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=token_budget, ranks=ranks).by_rank[rank]
    mask = padded([episode.mask for episode in DRAWN.episodes], fill=False)
    old = torch.zeros(mask.shape, dtype=torch.float64)
    seen: dict[str, Any] = {"losses": [], "norms": [], "log_probs": {}}
    for _ in range(2):
        for one, terms in zip(packs, engine.packed_log_probs(packs), strict=True):
            for row, place, value in zip(one.rows, one.places, terms.log_probs, strict=True):
                seen["log_probs"][int(row), int(place)] = value.item()
        batch = Evaluated(
            mask=mask,
            groups=torch.tensor(DRAWN.groups),
            rewards=torch.arange(len(DRAWN.groups)).double() % 4,
            valid=torch.ones(len(DRAWN.groups), dtype=torch.bool),
            log_probs=old - 3.0,
            sampled_log_probs=old - 3.0,
        )
        weights = ALGORITHM.weigh(batch)
        columns = [Columns.of(one, batch, weights, "cpu", torch.float32) for one in [*packs, EMPTY]]
        report = engine.train_step(PackedBatch(packs, columns[:-1], columns[-1]), partial(loss_of, weights=weights))
        seen["losses"].append(report.loss)
        seen["norms"].append(report.grad_norm)
        seen["statistics"] = dict(report.statistics)
    return seen


def main(kind: str, rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    try:
        engine = build_engine(kind)
        seen = train(engine, rank, ranks, token_budget=24)
        engine.close()
        torch.save(seen, folder / f"rank-{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
