"""What the hardware allows: copies of a model's tensors without any protocol, on one GPU and to a peer.

One process opens another one's flat buffer by torch's own CUDA IPC, once, and then copies it into its 339 tensors; what
is timed is from the message to the end of the copy.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

Shapes = tuple[tuple[int, ...], ...]


def _consumer(orders: Any, answers: Any, device: int, shapes: Shapes) -> None:
    torch.cuda.set_device(device)
    targets = [torch.empty(shape, dtype=torch.bfloat16, device=f"cuda:{device}") for shape in shapes]
    torch.cuda.synchronize()
    answers.put("ready")
    flat = orders.get()
    while orders.get() is not None:
        at = 0
        for target in targets:
            target.view(-1).copy_(flat[at : at + target.numel()], non_blocking=True)
            at += target.numel()
        torch.cuda.synchronize()
        answers.put("done")
    del flat


def copy_to_process(shapes: Shapes, device: int, times: int) -> float:
    """Median seconds until another process, with its memory on ``device``, has all tensors of this one's GPU 0."""
    context = mp.get_context("spawn")
    orders, answers = context.SimpleQueue(), context.SimpleQueue()
    other = context.Process(target=_consumer, args=(orders, answers, device, shapes))
    other.start()
    answers.get()
    flat = torch.randn(sum(int(np.prod(shape)) for shape in shapes), dtype=torch.bfloat16, device="cuda:0")
    torch.cuda.synchronize()
    orders.put(flat)
    taken = []
    for _ in range(times + 2):
        began = time.perf_counter()
        orders.put("copy")
        answers.get()
        taken.append(time.perf_counter() - began)
    orders.put(None)
    other.join()
    del flat
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    steady = sorted(taken[2:])
    return steady[len(steady) // 2]


def _sum_beside(nbytes: int, barrier: Any, answers: Any, copies: bool, times: int) -> None:
    from rlmesh.weights.transfer.tensor_bytes import checksums, copy_with_checksums

    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes if copies else 1, np.uint8)
    taken = []
    for _ in range(times + 1):
        barrier.wait(60)
        began = time.perf_counter()
        if copies:
            copy_with_checksums(source, target)
        else:
            checksums(source)
        taken.append(time.perf_counter() - began)
    answers.put(taken[1:])


def copy_and_sum_beside(nbytes: int, times: int, *, copying: int, summing: int) -> float:
    """Median seconds until so many processes have each copied and summed some bytes, and others have only summed as
    many, side by side: the work of a source and its sinks, without any protocol."""
    context = mp.get_context("spawn")
    kinds = [True] * copying + [False] * summing
    barrier, answers = context.Barrier(len(kinds)), context.SimpleQueue()
    workers = [context.Process(target=_sum_beside, args=(nbytes, barrier, answers, kind, times)) for kind in kinds]
    for worker in workers:
        worker.start()
    taken: list[list[float]] = [answers.get() for _ in workers]
    for worker in workers:
        worker.join()
    slowest: list[float] = sorted(max(one) for one in zip(*taken, strict=True))
    return slowest[times // 2]


def copy_in_memory(nbytes: int, times: int) -> float:
    """Median seconds to copy so many bytes in this machine's memory, on one core."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]
