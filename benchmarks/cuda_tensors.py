"""How fast do CUDA tensors go to a member on the same GPU, and back? python benchmarks/cuda_tensors.py

Two ways: as rlmesh sends them (a copy at the sender, a handle, a copy at the receiver), and through the host, as it
does where memory cannot be opened by others. Each figure is the median of ``ROUNDS`` calls after a warm-up, until the
value can be used at the other side.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmesh.runtime.connections.network import NetworkOptions
from tests.gpu.test_cuda_tensors import Pair, pair_of

ROUNDS, WARM_UP = 9, 3
SIZES_MIB = (1, 64, 512, 4096)
MOST_BY_HOST_MIB = 512


def seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(WARM_UP + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def measure(pair: Pair, way: str, mib: int) -> None:
    data = torch.arange(mib << 18, dtype=torch.float32, device="cuda")
    last = float(data[-1])

    def take() -> None:
        if pair.member.call("take", data).result() != last:
            raise RuntimeError("the member saw another value")

    there = seconds(take)
    back = seconds(lambda: pair.member.call("mirror", data).result())
    gigabytes = (mib << 20) / 1e9
    print(
        f"{way:18} {mib:5} MiB  to a member {1e3 * there:8.2f} ms {gigabytes / there:8.1f} GB/s   "
        f"there and back {1e3 * back:8.2f} ms {2 * gigabytes / back:8.1f} GB/s", flush=True,
    )  # fmt: skip


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    ways: dict[str, NetworkOptions | None] = {"handle": None, "through the host": NetworkOptions(share_memory=False)}
    for way, network in ways.items():
        with pair_of(network) as pair:
            for mib in SIZES_MIB:
                if network is None or mib <= MOST_BY_HOST_MIB:
                    measure(pair, way, mib)


if __name__ == "__main__":
    main()
