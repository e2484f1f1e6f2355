"""Collectives: one broadcast per bucket over a separate process group, NCCL between GPUs and Gloo between CPUs.

The group consists of the source rank and its sinks for one plan, with a store at the source; torch's default group is
not used. No member enters a broadcast before all are ready: each sink writes *ready* to the store, and the source then
writes *go*, or *stop* if a sink has failed. So a failing sink leaves no member in a collective that cannot be
cancelled. When a member is lost the group is aborted, and the next plan makes another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rlmesh.runtime.process import clock
from rlmesh.weights.channels.base import (
    SEND_TIMEOUT_SHARE,
    BucketTransfer,
    ChannelBroken,
    ChannelReceiver,
    ChannelSender,
    RouteSettings,
)
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.transfer.tensor_bytes import checksums_of, host_bytes

POLL_S = 0.0002
BUFFERS = 2
STOP = "stop"


def _ready(number: int, rank: int) -> str:
    return f"ready/{number}/{rank}"


def _go(number: int) -> str:
    return f"go/{number}"


def _poll(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Raises:
    ChannelBroken: the condition did not become true in time, or the store is gone.
    """
    end = clock.now() + timeout_s
    try:
        while not condition():
            if clock.now() >= end:
                raise ChannelBroken(f"{what} within {timeout_s:g} s")
            time.sleep(POLL_S)
    except RuntimeError as error:
        raise ChannelBroken(f"the group's store at the source is gone: {error}") from error


def _make_group(backend: str, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _end_group(group: Any) -> None:
    """Abort the group, which wakes all members that wait in it."""
    try:
        group.abort()
    except (RuntimeError, NotImplementedError, AttributeError):
        return  # Gloo's connections close with the last reference


def _broadcast(group: Any, data: Any, timeout_s: float) -> None:
    """Broadcast from rank 0; all members have said that they are ready.

    Raises:
        ChannelBroken: a member died, or the timeout expired.
    """
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    try:
        group.broadcast([data], options).wait(timedelta(seconds=timeout_s))
        if data.is_cuda:
            import torch

            torch.cuda.current_stream(data.device).synchronize()
    except RuntimeError as error:
        raise ChannelBroken(f"the broadcast failed: {error}") from error


class CollectiveSender(ChannelSender):
    """See `channels.base.ChannelSender`. It is rank 0 of its group."""

    joins_bytes = 0, 0

    def __init__(self, settings: RouteSettings) -> None:
        from torch._C._distributed_c10d import TCPStore

        self._settings = settings
        self._backend = "nccl" if settings.on_gpu else "gloo"
        timeout = timedelta(seconds=settings.timeout_s)
        self._store: Any = TCPStore(settings.host, 0, None, True, timeout, wait_for_workers=False)
        self._group: Any = None
        self._number = 0
        self._buffers: dict[int, Any] = {}

    def info(self, sink: str) -> Mapping[str, Any]:
        rank = self._settings.sinks.index(sink) + 1
        return {"backend": self._backend, "host": self._settings.host, "port": self._store.port, "rank": rank}

    def connect(self) -> None:
        settings = self._settings
        self._group = _make_group(self._backend, self._store, 0, len(settings.sinks) + 1, settings.timeout_s)

    def put(self, bucket: Bucket, tensors: Mapping[str, Any]) -> BucketTransfer:
        import torch

        on_gpu = next((t.device for t in tensors.values() if self._settings.on_gpu and t.is_cuda), None)
        device = on_gpu or torch.device("cpu")
        which = bucket.index if self._settings.keep else bucket.index % BUFFERS
        flat = self._buffers.get(which)
        if flat is None or flat.numel() < bucket.nbytes or flat.device != device:
            flat = self._buffers[which] = torch.zeros(max(bucket.nbytes, 1), dtype=torch.uint8, device=device)
        pieces = [flat[entry.offset : entry.offset + entry.nbytes] for entry in bucket.entries]
        for entry, piece in zip(bucket.entries, pieces, strict=True):
            if not entry.nbytes:
                continue
            if on_gpu is None:
                piece.copy_(torch.from_numpy(host_bytes(tensors[entry.name], entry.dtype)))
            else:
                whole = tensors[entry.name].detach().to(getattr(torch, entry.dtype)).contiguous()
                piece.copy_(whole.reshape(-1).view(torch.uint8), non_blocking=True)
        sums = [one for each in checksums_of(pieces) for one in each] if self._settings.verify else []
        return BucketTransfer(bucket, sums, flat[: max(bucket.nbytes, 1)])

    def transmit(self, transfer: BucketTransfer, stopped: Callable[[], bool]) -> None:
        self._number += 1
        ready = [_ready(self._number, rank) for rank in range(1, len(self._settings.sinks) + 1)]

        def all_ready() -> bool:
            if stopped():
                raise ChannelBroken("a sink has failed")
            return bool(self._store.check(ready))

        try:
            _poll(all_ready, SEND_TIMEOUT_SHARE * self._settings.timeout_s, "not all sinks were ready")
        except ChannelBroken as error:
            late = [sink for sink, key in zip(self._settings.sinks, ready, strict=True) if not self._is_set(key)]
            if len(late) == 1 and not stopped():
                raise ChannelBroken(f"{late[0]} was not ready for the broadcast; {error}", late[0]) from error
            raise
        self._store.set(_go(self._number), "")
        for old in (*ready, _go(self._number - 1)):
            self._store.delete_key(old)
        _broadcast(self._group, transfer.data, self._settings.timeout_s)

    def _is_set(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def abandon(self) -> None:
        if self._store is not None:
            self._store.set(STOP, "")

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            _end_group(group)
        self._buffers.clear()
        self._store = None


class CollectiveReceiver(ChannelReceiver):
    """See `channels.base.ChannelReceiver`."""

    keeps = False

    def __init__(self, settings: RouteSettings, info: Mapping[str, Any]) -> None:
        from torch._C._distributed_c10d import TCPStore

        timeout = timedelta(seconds=settings.timeout_s)
        self._store: Any = TCPStore(info["host"], info["port"], None, False, timeout)
        size = len(settings.sinks) + 1
        self._backend = info["backend"]
        self._group = _make_group(self._backend, self._store, info["rank"], size, settings.timeout_s)
        self._buffer: Any = None
        self._rank, self._number = info["rank"], 0

    def take(self, bucket: Bucket, payload: Any, timeout_s: float) -> Sequence[Any]:
        import torch

        nbytes = max(bucket.nbytes, 1)
        if self._buffer is None or self._buffer.numel() < nbytes:
            device = f"cuda:{torch.cuda.current_device()}" if self._backend == "nccl" else "cpu"
            self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        flat = self._buffer[:nbytes]
        self._number += 1
        self._store.set(_ready(self._number, self._rank), "")

        def may_go() -> bool:
            if self._store.check([STOP]):
                raise ChannelBroken("another sink has failed")
            return bool(self._store.check([_go(self._number)]))

        _poll(may_go, timeout_s, "the source did not start the broadcast")
        _broadcast(self._group, flat, timeout_s)
        data = flat if flat.is_cuda else flat.numpy()
        return [data[entry.offset : entry.offset + entry.nbytes] for entry in bucket.entries]

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            _end_group(group)
        self._store = self._buffer = None


def open_sender(settings: RouteSettings) -> CollectiveSender:
    return CollectiveSender(settings)


def open_receiver(settings: RouteSettings, sink: str, info: Mapping[str, Any]) -> CollectiveReceiver:
    return CollectiveReceiver(settings, info)
