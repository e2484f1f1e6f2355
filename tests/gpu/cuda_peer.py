"""A member in a process of its own that takes and gives CUDA tensors.

``python -m tests.gpu.cuda_peer KEY_HEX SOCKET_DIR``: prints its endpoint, serves until its input ends.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime


class Member:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    @rpc
    def pid(self) -> int:
        return os.getpid()

    @rpc
    def warm_up(self) -> str:
        return str(torch.ones(8, device="cuda").sum().item()) if torch.cuda.is_available() else "no GPU"

    @rpc
    def facts(self, value: Any) -> tuple[str, float]:
        """Device and sum of a tensor."""
        return str(value.device), float(value.double().sum())

    @rpc
    def mirror(self, value: Any) -> Any:
        return value

    @rpc
    def write(self, tensor: torch.Tensor) -> float:
        tensor.fill_(3.0)
        return float(tensor.sum())

    @rpc
    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)

    @rpc
    def sum_of_kept(self) -> list[float]:
        return [float(tensor.double().sum()) for tensor in self.kept]

    @rpc
    def give(self, mib: int) -> torch.Tensor:
        return torch.arange(mib << 18, dtype=torch.float32, device="cuda")

    @rpc
    def take(self, tensor: torch.Tensor) -> float:
        return float(tensor[-1])

    @rpc
    def allocated(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


def main() -> None:
    key, sockets = sys.argv[1:]
    with Runtime.start(name="M:0", key=bytes.fromhex(key), socket_dir=sockets, job_id="cuda") as runtime:
        runtime.serve("M:0", Member())
        print(runtime.endpoint, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
