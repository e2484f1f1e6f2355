"""Large arrays are reused when nobody refers to them any more."""

from __future__ import annotations

import numpy as np
import torch

from rlmesh.envs import EnvRunner, Policy, SampleBatch
from rlmesh.envs.runners.buffers import ArrayPool

from .environments import Frames

SHAPE, DTYPE = (4, 300, 1000), np.dtype(np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_an_array_is_reused_only_when_nobody_refers_to_it() -> None:
    pool = ArrayPool()
    first = pool.empty(SHAPE, DTYPE)
    place = address(first)
    view = first[1:3].reshape(-1)
    del first
    other = pool.empty(SHAPE, DTYPE)
    assert address(other) != place  # the view refers to the first one
    tensor = torch.from_numpy(view)
    del view
    assert address(pool.empty(SHAPE, DTYPE)) != place  # so does the tensor
    del tensor, other
    last = pool.empty(SHAPE, DTYPE)
    place = address(last)
    del last
    assert address(pool.empty(SHAPE, DTYPE)) == place


def test_batches_that_are_kept_stay_as_they_are() -> None:
    class Still(Policy):
        def compute_actions(self, obs_batch: np.ndarray, state_batches: None = None, **more: object) -> tuple:  # type: ignore[type-arg]
            return np.zeros(len(obs_batch), np.int64), None, {}

    def sampled(keep: bool) -> list[SampleBatch]:
        runner = EnvRunner(lambda context: Frames(), Still, seed=1, num_envs=4)
        kept = []
        for _ in range(4):
            batch = runner.sample(4 * 150)
            kept.append(batch if keep else batch.copy())
            del batch
        return kept

    assert sampled(keep=True) == sampled(keep=False)
