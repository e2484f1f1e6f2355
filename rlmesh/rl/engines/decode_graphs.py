"""`DecodeGraphs`: decode passes that are recorded as CUDA graphs and replayed.

A pass over one token per row launches over a thousand small kernels. The GPU computes each in microseconds, and waits
for Python in between. A graph launches all of them at once. It can be replayed while all addresses and shapes in it
stay the same. So inputs and logits have fixed memory, the numbers of rows and of cached tokens are rounded up to a few
sizes, and graphs belong to the addresses of weights and cache that they were recorded with. In an engine with two
buffers, weights have two sets of addresses.

A graph is used only if it gives the logits that the same pass gave without it. If recording fails (the model asks the
GPU for a number during the pass, say), or the logits differ, a warning says so, and passes run without graphs.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rlmesh.rl.engines.training.offload import clear_workspaces

__all__ = ["DecodeGraphs", "graphs_for", "padded_rows", "padded_width", "record_on_gpu"]

logger = logging.getLogger(__name__)

Compute = Callable[[Tensor], Tensor]
"""One pass over inputs ``[n, rows]`` on the GPU; returns logits ``[rows, vocabulary]``."""
Record = Callable[[Callable[[], Tensor], Tensor, Any], Callable[[], None]]
"""See `record_on_gpu`."""

RECORD_AT = 2
"""A size is recorded when it is asked for the second time."""
MOST_ADDRESSES = 2
"""The number of sets of addresses whose graphs are kept."""
SAME, SAME_ROUNDINGS = 1e-3, 8
"""The largest allowed difference between the logits of a graph and of the pass: relative to the largest logit, or in
roundings of their dtype, whichever is larger. Kernels with other workspaces may add in another order."""


def padded_rows(count: int) -> int:
    """The number of rows of a graph for ``count`` rows: a power of two from 8 to 64, then a multiple of 64."""
    return max(8, 1 << (count - 1).bit_length()) if count <= 64 else -(-count // 64) * 64


def padded_width(reach: int) -> int:
    """The number of cached tokens of a graph for ``reach`` tokens: a multiple of 256; from 1,024 on, at most a quarter
    more."""
    step = max(256, 1 << max(reach.bit_length() - 3, 0))
    return -(-reach // step) * step


@dataclass(eq=False)
class _GraphsOfAddresses:
    """The graphs that were recorded with one set of addresses, by size, and how often each size was asked for."""

    graphs: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    asked: Counter[tuple[int, int]] = field(default_factory=Counter)


class DecodeGraphs:
    """The graphs of one model. Not thread-safe.

    Args:
        tensors: the weights; graphs belong to their addresses.
        record: makes the function that replays a pass; for tests.
    """

    def __init__(self, tensors: Iterable[Tensor], record: Record | None = None) -> None:
        self._tensors, self._record = list(tensors), record or record_on_gpu
        self._by_addresses: dict[tuple[Any, ...], _GraphsOfAddresses] = {}
        """Graphs by addresses, the addresses that were used last at the end."""
        self._inputs: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self._pool: Any = None
        self.works = True
        """False after a recording that failed."""

    @property
    def count(self) -> int:
        """The number of graphs."""
        return sum(len(recorded.graphs) for recorded in self._by_addresses.values())

    def clear(self) -> None:
        """Free the memory of all graphs."""
        for held in (self._by_addresses, self._inputs, self._logits):
            held.clear()
        self._pool = None

    def run(self, compute: Compute, inputs: Tensor, size: tuple[int, int], memory: Sequence[Tensor]) -> Tensor | None:
        """Replay a pass and return its logits. None: there is no graph of this size yet, and the pass was not computed.

        Args:
            compute: the pass.
            inputs: ``[n, rows]`` of integers, on the host; further columns are 0.
            size: rows and cached tokens of the pass.
            memory: tensors of the cache.

        Returns:
            ``[rows, vocabulary]``, valid until the next pass.
        """
        if not self.works:
            return None
        recorded = self._of_addresses(memory)
        replay = recorded.graphs.get(size)
        if replay is None:
            recorded.asked[size] += 1
            if recorded.asked[size] < RECORD_AT:
                return None
        room = self._inputs.get(size[0])
        if room is None:
            room = self._inputs[size[0]] = torch.zeros(len(inputs), size[0], dtype=torch.long, device=memory[0].device)
        padded = torch.zeros(len(inputs), size[0], dtype=torch.long)
        padded[:, : inputs.shape[1]] = inputs
        room.copy_(padded)
        if replay is None:
            replay = self._try_to_record(lambda: compute(room), size[0])
            if replay is None:
                return None
            recorded.graphs[size] = replay
        replay()
        return self._logits[size[0]]

    def _of_addresses(self, memory: Sequence[Tensor]) -> _GraphsOfAddresses:
        addresses = (
            *[tensor.data_ptr() for tensor in self._tensors],
            *[(tensor.data_ptr(), tensor.shape) for tensor in memory],
        )
        recorded = self._by_addresses[addresses] = self._by_addresses.pop(addresses, _GraphsOfAddresses())
        if len(self._by_addresses) > MOST_ADDRESSES:
            del self._by_addresses[next(iter(self._by_addresses))]
        return recorded

    def _try_to_record(self, compute: Callable[[], Tensor], rows: int) -> Callable[[], None] | None:
        """A graph of the pass, if it can be recorded and gives the same logits."""
        try:
            wanted = compute()
            room = self._logits.get(rows)
            if room is None:
                room = self._logits[rows] = torch.empty_like(wanted)
            if self._pool is None and wanted.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
            replay = self._record(compute, room, self._pool)
            room.fill_(torch.nan)
            replay()
            gap = (room.double() - wanted.double()).abs().max()
            most = max(SAME, SAME_ROUNDINGS * torch.finfo(wanted.dtype).eps) * wanted.double().abs().max()
            if not bool(gap <= most):
                raise RuntimeError(f"its logits differ by {float(gap):g} from those of the pass")
        except Exception as error:
            logger.warning("the engine samples without CUDA graphs, which takes several times as long: the model's "
                           "pass could not be recorded (%s)", str(error).split("\n")[0])  # fmt: skip
            self.clear()
            self.works = False
            return None
        return replay


def record_on_gpu(compute: Callable[[], Tensor], logits: Tensor, pool: Any) -> Callable[[], None]:
    """Record a pass that writes its logits to ``logits``; returns the function that replays it on the current stream.

    Raises:
        RuntimeError: the pass cannot be recorded.
    """
    device = logits.device
    stream, current = _side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        logits.copy_(compute())  # libraries allocate what they need on the stream
    current.wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # A graph needs its own workspace of cuBLAS: another thread may free the common ones.
    clear_workspaces()
    try:
        with _no_collection(), torch.cuda.stream(stream):
            # Other threads of this process may allocate, copy and compute meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                logits.copy_(compute())
            finally:
                graph.capture_end()
    except BaseException:
        # After a failed recording, torch would continue to allocate from the graph's memory.
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(RuntimeError):
                end(device.index or 0, pool)
        raise
    finally:
        clear_workspaces()
    return graph.replay


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream for recording, since the default stream cannot record. Torch keeps its memory, so all graphs share
    it."""
    return torch.cuda.Stream(device)


def graphs_for(model: nn.Module) -> DecodeGraphs | None:
    """The graphs of a model; None if it is not on a GPU."""
    if next(model.parameters()).device.type != "cuda":
        return None
    return DecodeGraphs([*model.parameters(), *model.buffers()])


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that is collected now might free GPU memory, which ends a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
