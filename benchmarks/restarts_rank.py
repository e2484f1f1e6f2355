"""The elastic role of ``restarts.py``, in a module of its own: it needs torch, and the others do not."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rlmesh import rpc


class Rank:
    """One of a group."""

    def setup(self) -> None:
        dist.init_process_group("gloo")

    def teardown(self) -> None:
        dist.destroy_process_group()

    @rpc
    def pid(self) -> int:
        return os.getpid()

    @rpc
    def sum_of_ranks(self) -> float:
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        return float(total)
