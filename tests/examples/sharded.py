"""One rank of a sharded model in training; started as a process per rank by test_ppo_sharded.py.

Argument: a JSON object with rank, ranks, rows, micro_batch_sizes and folder. Prints a result per size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ppo.common import Experience
from ppo.config import PPOConfig
from ppo.training import Learner, make_engine
from torch import Tensor, nn

from rlmesh.rl.losses import aggregate, value_clip_loss


def experience(rows: int) -> Experience:
    """Rows of 2 + 3 tokens; response lengths differ, and the last row has none."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(3) < (torch.arange(rows) % 4).flip(0).unsqueeze(1)
    numbers = [torch.randn(rows, 3, generator=generator) for _ in range(4)]
    poisoned = [torch.where(mask, x, float("nan")) for x in numbers]
    return Experience(torch.randn(rows, 5, generator=generator), torch.ones(rows, 5), mask, *poisoned)


def train(micro_batch_size: int, rows: int, checkpoint: Path) -> dict[str, Any]:
    """Two batches of two passes each; the statistics of both, and the weights after them."""
    learner = fresh(0, micro_batch_size, minibatches=1)
    mine = experience(rows).split(dist.get_world_size())[dist.get_rank()]
    statistics = [learner.update(mine, loss) for _ in range(2)]
    learner.engine.export(checkpoint)
    return {"statistics": statistics, "weights": weights_of(learner), "goes_on": goes_on(mine, checkpoint)}


def fresh(seed: int, micro_batch_size: int, minibatches: int) -> Learner:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    config = PPOConfig(micro_batch_size=micro_batch_size, minibatches=minibatches, ppo_epochs=2, max_grad_norm=0.05)
    return Learner(make_engine("fsdp2", model, config, lr=0.01), config)


def loss(model: nn.Module, part: Experience, count: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    values = model(part.sequences)
    terms = value_clip_loss(values, part.values, part.returns, part.action_mask)
    share = aggregate(terms.loss, part.action_mask, "token-mean", denominator=count)
    return share, {"loss": share}


def weights_of(learner: Learner) -> dict[str, Any]:
    source = learner.engine.named_tensors()
    names = [spec.name for spec in source.manifest() if spec.kind == "parameter"]
    with source.gather(names) as whole:
        return {name: tensor.tolist() for name, tensor in whole.items()}


def goes_on(mine: Experience, checkpoint: Path) -> bool:
    """Whether another model that takes a checkpoint back goes on exactly as the one that wrote it, draws included."""
    first = fresh(0, 100, minibatches=2)
    first.update(mine, loss)
    path = checkpoint.with_suffix(".again")
    first.engine.save(path).result()
    other = fresh(1, 100, minibatches=2)
    other.engine.load(path)
    for learner in (first, other):
        learner.update(mine, loss)
    return weights_of(first) == weights_of(other)


def main() -> None:
    args = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    folder = Path(args["folder"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=args["rank"], world_size=args["ranks"])
    results = [train(size, args["rows"], folder / f"micro-{size}") for size in args["micro_batch_sizes"]]
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
