"""The pause of training for a checkpoint, beside one copy of the state from the device to host memory.

``python benchmarks/checkpoint_pause.py --parameters 494`` (millions) trains steps of a model of equal matrices with
AdamW on one GPU, or on one core of a CPU, and saves a checkpoint after each. Each line has the time of ``save()``,
which is the pause; the time of one copy of the same state to new host memory (``tensor.to("cpu")``), and to memory that
is there already (pinned, with a GPU); and how long the checkpoint took until it was complete on disk. The first
checkpoint also makes the memory that later ones use.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlmesh.rl.engines.training.ddp import DDPEngine
from rlmesh.rl.engines.training.protocol import TrainingOptions

MATRIX = 1 << 22


class Matrices(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        count = max(1, parameters // MATRIX)
        self.matrices = nn.ParameterList([nn.Parameter(torch.ones(2048, MATRIX // 2048)) for _ in range(count)])

    def forward(self) -> Tensor:
        return torch.stack([one.mean() for one in self.matrices]).sum()


class OneRow:
    def __len__(self) -> int:
        return 1

    def split(self, parts: int) -> list[OneRow]:
        return [self] * parts


def tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for one in state.values():
            yield from tensors_in(one)


def copied(state: list[Tensor]) -> list[Tensor]:
    return [one.to("cpu", copy=True) for one in state]


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for to, one in pairs:
        to.copy_(one)


def took_s(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=25.0, help="millions")
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = DDPEngine(Matrices(int(options.parameters * 1e6)).to(device), TrainingOptions(lr=1e-3))
    held: list[Tensor] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.checkpoints):
            engine.train_step(OneRow(), lambda model, part: (model(), {}))
            state = [*tensors_in(engine._state())]
            fresh_s = took_s(partial(copied, state))
            held = held or [torch.empty(one.shape, dtype=one.dtype, pin_memory=device == "cuda") for one in state]
            pairs = [*zip(held, state, strict=True)]
            kept_s = took_s(partial(copy_all, pairs))
            began = time.perf_counter()
            saving = engine.save(Path(folder) / "checkpoints")
            pause_s = time.perf_counter() - began
            saving.result()
            line = {
                "checkpoint": number, "device": device, "state_bytes": sum(one.nbytes for one in state),
                "pause_s": pause_s, "copy_s": fresh_s, "copy_to_kept_memory_s": kept_s,
                "complete_s": time.perf_counter() - began,
            }  # fmt: skip
            print(json.dumps({key: round(one, 4) if isinstance(one, float) else one for key, one in line.items()}))
    engine.close()


if __name__ == "__main__":
    main()
