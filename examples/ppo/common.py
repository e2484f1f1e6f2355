"""Types that roles pass to each other, and functions that several roles use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rlmesh import current_worker
from rlmesh.rl import Sample

from .config import PPOConfig

MAX_LENGTH = 64
"""Length limit of sequences in tokens: the model's number of positions."""


def job_config() -> PPOConfig:
    """The settings, in any worker of the job."""
    return PPOConfig(**current_worker().job_info.user_config)


def pretrained() -> Path:
    """Folder of the model before PPO, in any worker of the job."""
    return Path(current_worker().run_dir) / "pretrained"


def trained() -> Path:
    """Folder of the model after PPO, in any worker of the job."""
    return Path(current_worker().run_dir) / "trained"


@dataclass(frozen=True)
class Batch:
    """Samples as tensors: prompts padded on the left, responses on the right.

    Shapes: ``sequences`` and ``attention_mask`` are ``[batch, prompt + response]``; ``action_mask`` is
    ``[batch, response]``, True at the tokens that the policy sampled.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], pad_token_id: int) -> Batch:
        prompts, attend = left_pad([s.prompt_token_ids for s in samples], pad_token_id)
        responses, chosen = right_pad([s.token_ids for s in samples], pad_token_id)
        return cls(torch.cat([prompts, responses], 1), torch.cat([attend, chosen], 1), chosen)


@dataclass(frozen=True)
class Experience:
    """A batch with all inputs of the updates; the last four are ``[batch, response]``."""

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __len__(self) -> int:
        return self.sequences.shape[0]

    def split(self, parts: int) -> list[Experience]:
        """Consecutive parts whose sizes differ by at most one."""
        columns = [getattr(self, field.name).tensor_split(parts) for field in fields(self)]
        return [Experience(*part) for part in zip(*columns, strict=True)]

    def rows(self, index: Tensor) -> Experience:
        return Experience(*(getattr(self, field.name)[index] for field in fields(self)))


def left_pad(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[batch, longest]`` with the padding first, and a mask of real tokens."""
    width = max(map(len, rows))
    tokens = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows])
    return tokens, torch.arange(width) >= width - torch.tensor([len(row) for row in rows]).unsqueeze(1)


def right_pad(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[batch, longest]`` with the padding last, and a mask of real tokens."""
    width = max(map(len, rows))
    tokens = torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows])
    return tokens, torch.arange(width) < torch.tensor([len(row) for row in rows]).unsqueeze(1)


def pad_values(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    """Numbers ``[batch, width]``, padded with zeros."""
    return torch.tensor([list(row) + [0.0] * (width - len(row)) for row in rows])


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that, even after a crash, ``path`` is absent, the old file or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
