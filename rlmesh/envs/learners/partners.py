"""`Partners`: the learners that update one module together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rlmesh.errors import RLMeshError

__all__ = ["ALONE", "LearnerShare", "PartnerLost", "Partners", "ProcessPartners"]


class PartnerLost(RLMeshError):
    """A learner of the group ended, or could not be reached, while the others waited for its gradients."""


class LearnerShare(NamedTuple):
    """The units of a batch that one learner has: rows, or, of a module with memory, sequences.

    Attributes:
        first: number of its first unit in the whole batch.
        total: units of the whole batch.
        lengths: rows of each unit of the whole batch, ``[total]``; None: one each.
    """

    first: int
    total: int
    lengths: np.ndarray | None = None


class Partners:
    """A learner alone: its sums are the sums of all."""

    size = 1

    def add(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum of all learners' tensors, the same bits at each of them."""

    def mean_and_std(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation (of n - 1) of the values of all learners together; of one value, 0 and 1."""
        count_and_sum = torch.stack([torch.tensor(float(len(values)), dtype=torch.float64), values.double().sum()])
        self.add(count_and_sum)
        count, total = count_and_sum
        if count < 2:
            return values.new_zeros(()), values.new_ones(())
        mean = total / count
        squares = (values.double() - mean).square().sum()
        self.add(squares)
        return mean.to(values.dtype), (squares / (count - 1)).sqrt().to(values.dtype)

    def leave(self) -> None:
        """End the group, so that the others do not wait."""


ALONE = Partners()


class ProcessPartners(Partners):
    """The ranks of this process's torch.distributed group."""

    def __init__(self) -> None:
        import torch.distributed

        self._distributed = torch.distributed
        self.size = torch.distributed.get_world_size()

    def add(self, tensor: torch.Tensor) -> None:
        try:
            self._distributed.all_reduce(tensor)
        except (RuntimeError, ValueError) as error:  # ValueError: the group has ended here
            raise PartnerLost(f"the sum over {self.size} learners failed: {error}") from error

    def leave(self) -> None:
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group()
