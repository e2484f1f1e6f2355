"""Trains and saves in a loop until it is killed; a process of test_training_checkpoints.py.

Argument: a folder. Prints the number of steps of each checkpoint that is complete.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlmesh.rl.engines.training.ddp import DDPEngine
from rlmesh.rl.engines.training.protocol import TrainingOptions


class Squares(nn.Module):
    """A model whose weights after n steps are known: each step takes ``lr`` off all (AdamW, constant gradient)."""

    def __init__(self, size: int = 1 << 20) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self) -> Tensor:
        return self.weight.mean()


class Nothing:
    """A batch of one row that is not looked at."""

    def __len__(self) -> int:
        return 1

    def split(self, parts: int) -> list[Nothing]:
        return [self] * parts


def make(size: int = 1 << 20) -> Any:
    return DDPEngine(Squares(size), TrainingOptions(lr=0.125, eps=0.0, max_grad_norm=0))


def step(engine: Any) -> None:
    engine.train_step(Nothing(), lambda model, part: (model(), {}))


def main() -> None:
    torch.set_num_threads(1)
    engine = make()
    while True:
        step(engine)
        engine.save(Path(sys.argv[1])).result()
        print(engine.steps, flush=True)


if __name__ == "__main__":
    main()
