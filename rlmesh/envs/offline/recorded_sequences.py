"""`RecordedSequences`: recorded steps as sequences, for modules with memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.learners.sequences import PREFIX
from rlmesh.envs.modules.rl_module import RLModule
from rlmesh.envs.offline.recorded_steps import RecordedPart, RecordedSteps

__all__ = ["RecordedSequences"]

ROWS = 4096
"""Observations of one pass over parts; bounds the memory of activations."""


class RecordedSequences:
    """The recorded parts, cut into sequences of at most ``longest`` steps, and the module's states before them.

    Nobody recorded the states of the module that learns: they are those of a pass over the part so far, with the
    weights of now. A part begins with the initial state.

    Args:
        data: the recorded steps.
        longest: steps of a sequence.
    """

    def __init__(self, data: RecordedSteps, longest: int) -> None:
        self.data, self.longest = data, longest
        lengths = np.array([len(part) for part in data.parts])
        counts = -(-lengths // longest)
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self.part = np.repeat(np.arange(len(lengths)), counts)
        """Number of the part of each sequence."""
        place = np.arange(len(self.part)) - self._first[self.part]
        self._start = (np.cumsum(lengths) - lengths)[self.part] + place * longest
        self.lengths = np.minimum(lengths[self.part] - place * longest, longest)
        """Steps of each sequence."""

    def __len__(self) -> int:
        return len(self.part)

    def rows(self, sequences: np.ndarray) -> np.ndarray:
        """The rows of ``data.batch`` that are the steps of these sequences, one sequence after the other."""
        return np.concatenate([np.arange(self._start[i], self._start[i] + self.lengths[i]) for i in sequences])

    def batch(self, sequences: np.ndarray, states: Mapping[str, np.ndarray]) -> SampleBatch:
        """The steps of sequences as a batch, from which a learner makes these sequences again.

        Args:
            sequences: their numbers, which may repeat.
            states: before each sequence of the data, as `look` gives them.
        """
        batch: SampleBatch = self.data.batch[self.rows(sequences)]
        lengths = self.lengths[sequences]
        first = np.cumsum(lengths) - lengths
        batch[columns.EPS_ID] = np.repeat(sequences, lengths)
        batch[columns.T] = np.arange(len(batch)) - np.repeat(first, lengths)
        for name, each in states.items():
            column = np.zeros((len(batch), *each.shape[1:]), each.dtype)  # a learner reads that of the first step
            column[first] = each[sequences]
            batch[PREFIX + name] = column
        return batch

    @torch.no_grad()
    def look(
        self, module: RLModule, sequences: np.ndarray, *, values: bool
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Pass over the parts of some sequences.

        Args:
            sequences: their numbers.
            values: compute values too.

        Returns:
            The state before each sequence, ``[all sequences, …]``, those of other parts zero; and the value of the
            observation after the last step of each part, ``[parts]``: 0 if it was not asked for or is not known.
        """
        initial = module.get_initial_state()
        found = {name: np.zeros((len(self), *each.shape), each.numpy().dtype) for name, each in initial.items()}
        last = np.zeros(len(self.data.parts), np.float32)
        wanted = np.unique(self.part[sequences])
        group = max(1, ROWS // self.longest)
        # Parts of similar lengths go together, so that few passes are short of parts.
        wanted = wanted[np.argsort([len(self.data.parts[i]) for i in wanted], kind="stable")]
        for start in range(0, len(wanted), group):
            self._pass(module, wanted[start : start + group], found, last if values else None)
        return found, last

    def _pass(
        self, module: RLModule, numbers: np.ndarray, found: dict[str, np.ndarray], last: np.ndarray | None
    ) -> None:
        """Fill in the states before all sequences of some parts, and the values after them."""
        states = {name: each.expand(len(numbers), *each.shape) for name, each in module.get_initial_state().items()}
        for chunk, (here, obs, mask) in enumerate(self._chunks([self.data.parts[i] for i in numbers])):
            states = {name: each[here] for name, each in states.items()}
            numbers = numbers[here]
            begins = chunk < self._first[numbers + 1] - self._first[numbers]  # not only the observation after the end
            for name, each in states.items():
                found[name][self._first[numbers[begins]] + chunk] = each.numpy()[begins]
            given = {columns.OBS: torch.from_numpy(obs), columns.STATE_IN: states, columns.MASK: torch.from_numpy(mask)}
            outputs = module.forward_train(given)
            states = outputs[columns.STATE_OUT]
            if last is None:
                continue
            lengths = np.array([len(self.data.parts[i]) for i in numbers]) - chunk * self.longest
            ends = np.flatnonzero((lengths >= 0) & (lengths < mask.sum(1)))
            last[numbers[ends]] = outputs[columns.VF_PREDS].float().numpy()[ends, lengths[ends]]

    def _chunks(self, parts: list[RecordedPart]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The observations of parts, ``longest`` at a time: which of the parts before go on, their observations
        ``[parts, time, …]``, padded with zeros at the ends, and where there are some."""
        dtype, longest = self.data.batch[columns.OBS].dtype, self.longest
        start = 0
        while True:
            here = np.array([len(part.observations) > start for part in parts])
            parts = [part for part, goes_on in zip(parts, here, strict=True) if goes_on]
            if not parts:
                return
            shape = self.data.batch[columns.OBS].shape[1:]
            obs, mask = np.zeros((len(parts), longest, *shape), dtype), np.zeros((len(parts), longest), bool)
            for i, part in enumerate(parts):
                given = part.observations[start : start + longest]
                obs[i, : len(given)], mask[i, : len(given)] = given, True
            yield here, obs, mask
            start += longest
