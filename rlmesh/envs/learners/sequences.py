"""Sequences: rows of a batch side by side, for modules with memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.modules.rl_module import RLModule
from rlmesh.errors import UsageError

__all__ = [
    "forward_sequences", "sequence_columns", "sequence_starts", "sequences_of", "state_columns", "states_in",
    "with_the_last", "zeroed",
]  # fmt: skip

PREFIX = f"{columns.STATE_IN}_"


def sequences_of(batch: SampleBatch, names: tuple[str, ...], states: list[str], longest: int) -> dict[str, np.ndarray]:
    """The rows of a batch cut into sequences, padded with zeros at their ends.

    A sequence has consecutive steps of one episode. It ends with the episode, where the rows do not go on, and after
    ``longest`` steps.

    Args:
        names: columns of steps.
        states: names of states, without ``state_in_``; of these columns, a sequence has that of its first step.

    Returns:
        Columns ``[sequences, time, …]``, states ``[sequences, …]``, and ``mask`` ``[sequences, time]``.

    Raises:
        UsageError: the batch lacks a column.
    """
    if lacks := [name for name in sequence_columns(states) if name not in batch]:
        raise UsageError(f"a module with memory learns from sequences, and the batch has no column {lacks[0]!r}")
    first = sequence_starts(batch, longest)
    lengths = np.diff(first, append=len(batch))
    which = np.repeat(np.arange(len(first)), lengths)
    place = np.arange(len(batch)) - first[which]
    shape = (len(first), int(place.max(initial=0)) + 1)
    found = {}
    for name in names:
        column = batch[name]
        found[name] = np.zeros((*shape, *column.shape[1:]), column.dtype)
        found[name][which, place] = column
    found[columns.MASK] = np.zeros(shape, bool)
    found[columns.MASK][which, place] = True
    return {**found, **{PREFIX + name: batch[PREFIX + name][first] for name in states}}


def sequence_columns(states: list[str]) -> list[str]:
    """The columns that sequences are made by, for these names of states; none without states."""
    return [columns.EPS_ID, columns.T, *state_columns(states)] if states else []


def state_columns(states: list[str]) -> list[str]:
    """The columns of a batch that have these states."""
    return [PREFIX + name for name in states]


def sequence_starts(batch: Mapping[str, np.ndarray], longest: int) -> np.ndarray:
    """The rows that begin the sequences of `sequences_of`, ascending."""
    episode, t = batch[columns.EPS_ID], batch[columns.T]
    rows = np.arange(len(t))
    breaks = np.ones(len(t), bool)
    breaks[1:] = (episode[1:] != episode[:-1]) | (t[1:] != t[:-1] + 1)
    return np.flatnonzero((rows - np.maximum.accumulate(np.where(breaks, rows, 0))) % longest == 0)


def states_in(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states of the columns ``state_in_…``, by name."""
    return {name.removeprefix(PREFIX): value for name, value in batch.items() if name.startswith(PREFIX)}


def zeroed(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values ``[sequences, time, …]`` with zeros where the mask is false: a NaN there would spread to all gradients."""
    return values.masked_fill(~mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim)), 0)


def forward_sequences(
    module: RLModule, batch: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The training pass over padded sequences: its results, and the columns that they belong to, of the steps alone.

    Returns:
        Both ``[steps, …]``, without padding, in the same order.
    """
    mask, states = batch[columns.MASK], states_in(batch)
    steps = {name: value for name, value in batch.items() if name != columns.MASK and not name.startswith(PREFIX)}
    given: dict[str, Any] = {name: zeroed(value, mask) for name, value in steps.items()}
    outputs = dict(module.forward_train({**given, columns.STATE_IN: states, columns.MASK: mask}))
    outputs.pop(columns.STATE_OUT, None)
    return {name: value[mask] for name, value in outputs.items()}, {name: each[mask] for name, each in steps.items()}


def with_the_last(obs: torch.Tensor, new_obs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Observations ``[sequences, time + 1, …]``: those before the steps, then that after each sequence's last step."""
    rows, lengths = torch.arange(len(obs)), mask.sum(1)
    longer = torch.cat([obs, torch.zeros_like(obs[:, :1])], 1)
    longer[rows, lengths] = new_obs[rows, lengths - 1]
    return longer
