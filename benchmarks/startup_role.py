"""A role whose module needs torch, for benchmarks/startup.py."""

from __future__ import annotations

import torch

from rlmesh import rpc


class Role:
    def setup(self) -> None:
        self.value = torch.ones(1)

    @rpc
    def get(self) -> float:
        return float(self.value)


class Driver:
    def run(self) -> None:
        pass
