"""A member in a process of its own that takes and gives tensors of the fake device.

``python -m tests.memory.device_peer KEY_HEX SOCKET_DIR FOLDER NAME…``: prints its endpoint, serves until its input
ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from tests.memory import fake_device
from tests.own_time import HANG_S


class Member:
    @rpc
    def take(self, tensor: torch.Tensor) -> float:
        deadline = time.monotonic() + HANG_S
        while not (data := tensor.data_of_test) and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.001)  # the fake device copies later than a stream would
        assert data
        return float(fake_device.values_of(tensor).sum())

    @rpc
    def give(self, count: int) -> torch.Tensor:
        return fake_device.on_device(torch.arange(count, dtype=torch.float32))

    @rpc
    def hold(self, tensor: torch.Tensor) -> None:
        """Never copy: the device hangs."""

    @rpc
    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    key, sockets, folder, *names = sys.argv[1:]
    backend = fake_device.install(Path(folder), *names)
    with Runtime.start(name="M:0", key=bytes.fromhex(key), socket_dir=sockets, job_id="device") as runtime:
        runtime.serve("M:0", Member())
        print(runtime.endpoint, flush=True)
        sys.stdin.read()
    assert backend.faults == [], backend.faults


if __name__ == "__main__":
    main()
