"""CUDA IPC: sinks on the same GPU, or on one that reaches it, copy from the source's own memory.

A fenced source whose weights stay where they are is read as it is: nothing is copied at the source, and its handles
are opened once. Weights that are gathered, cast or snapshotted go through memory of the outlet's own: two buckets that
are used in turn, or one per bucket with a snapshot. Memory that has no handles (expandable segments) is found out when
it is put, and goes the same way.

Nobody reads what is freed: a sink answers when its copy has ended, and closes its handles before the source frees
anything (`Link.close` waits for that).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlmesh.weights.channels.base import ChannelBroken, Parcel, RouteSettings
from rlmesh.weights.cuda import checksums, copy_with_checksums, describe_device, index_of
from rlmesh.weights.cuda_memory import Allocation, Opened, Unshareable, bytes_at, export, make_current
from rlmesh.weights.plan import Bucket

logger = logging.getLogger(__name__)

TURNS = 2


class CudaOutlet:
    """See `channels.base.Outlet`."""

    def __init__(self, settings: RouteSettings) -> None:
        self._settings = settings
        self._own: dict[int, Allocation] = {}
        self._direct = settings.lasting and not settings.keep
        self._device = ""

    def info(self, sink: str) -> Mapping[str, Any]:
        return {}

    def connect(self) -> None:
        return

    def put(self, bucket: Bucket, tensors: Mapping[str, Any]) -> Parcel:
        import torch

        whole = [tensors[entry.name].detach() for entry in bucket.entries]
        device = next((tensor.device for tensor in whole if tensor.is_cuda), None)
        if device is None:
            raise ChannelBroken(f"bucket {bucket.index} is not on a GPU")
        self._device = str(device)
        with torch.cuda.device(device):
            places = self._places(bucket, whole) if self._direct else None
            sums: list[int] = []
            if places is None:
                places, sums = self._copy(bucket, whole)
            elif self._settings.verify:
                sums = checksums([_bytes(tensor) for tensor in whole])
            # Whoever reads next does so from another process, which knows nothing of this one's streams.
            torch.cuda.current_stream().synchronize()
        return Parcel(bucket, sums, (describe_device(self._device)[0], places, whole))

    def _places(self, bucket: Bucket, whole: Sequence[Any]) -> list[tuple[bytes, int]] | None:
        """Handle and offset of each tensor where it is; None if they must be copied."""
        from rlmesh.weights.pieces import dtype_name

        for entry, tensor in zip(bucket.entries, whole, strict=True):
            if not tensor.is_cuda or not tensor.is_contiguous() or dtype_name(tensor) != entry.dtype:
                return None
        try:
            make_current(self._device)
            return [export(tensor.data_ptr()) if tensor.numel() else (b"", 0) for tensor in whole]
        except Unshareable as error:
            logger.warning("the weights of %s are copied before they are shared, since %s (expandable segments?)",
                           self._settings.source, error)  # fmt: skip
            self._direct = False
            return None

    def _copy(self, bucket: Bucket, whole: Sequence[Any]) -> tuple[list[tuple[bytes, int]], list[int]]:
        import torch

        turn = bucket.index if self._settings.keep else bucket.index % TURNS
        own = self._own.get(turn)
        if own is None or own.nbytes < bucket.nbytes:
            if own is not None:
                self._own.pop(turn).free()
            own = self._own[turn] = Allocation(bucket.nbytes, self._device)
        targets = [own.tensor(entry.offset, entry.nbytes) for entry in bucket.entries]
        ready = [
            _bytes(tensor.to(device=self._device, dtype=getattr(torch, entry.dtype)))
            for entry, tensor in zip(bucket.entries, whole, strict=True)
        ]
        sums: list[int] = []
        if self._settings.verify:
            sums = copy_with_checksums(ready, targets)
        else:
            for target, source in zip(targets, ready, strict=True):
                target.copy_(source, non_blocking=True)
        return [(own.handle, entry.offset) for entry in bucket.entries], sums

    def payload(self, parcel: Parcel, sink: str) -> Any:
        uuid, places, _ = parcel.data
        handles = list(dict.fromkeys(handle for handle, _ in places))
        number = {handle: i for i, handle in enumerate(handles)}
        return [uuid, handles, [(number[handle], offset) for handle, offset in places]]

    def transmit(self, parcel: Parcel, stopped: Callable[[], bool]) -> None:
        return

    def taken(self, parcel: Parcel) -> None:
        parcel.data = None

    def abandon(self) -> None:
        return

    def close(self) -> None:
        own, self._own = self._own, {}
        for allocation in own.values():
            allocation.free()


def _bytes(tensor: Any) -> Any:
    """``[n]`` of uint8 over a tensor's memory, or over that of a contiguous copy."""
    import torch

    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)


class CudaInlet:
    """See `channels.base.Inlet`."""

    keeps = False

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._opened = Opened()
        self._used: set[bytes] = set()

    def take(self, bucket: Bucket, payload: Any, timeout_s: float) -> Sequence[Any]:
        uuid, handles, places = payload
        try:
            device = f"cuda:{index_of(uuid)}"
        except LookupError as error:
            raise ChannelBroken(f"{self._sink} cannot open the source's memory: {error}", self._sink) from error
        bases = [self._opened.address(handle) if handle else 0 for handle in handles]
        self._used.update(handles)
        return [
            bytes_at(bases[number] + offset, entry.nbytes, device, self)
            for entry, (number, offset) in zip(bucket.entries, places, strict=True)
        ]

    def done(self) -> None:
        return

    def settle(self) -> None:
        """Close what the last push did not use: the source may have freed it."""
        self._opened.keep_only(self._used)
        self._used = set()

    def close(self) -> None:
        self._opened.close()


def open_outlet(settings: RouteSettings) -> CudaOutlet:
    return CudaOutlet(settings)


def open_inlet(settings: RouteSettings, sink: str, info: Mapping[str, Any]) -> CudaInlet:
    return CudaInlet(sink)
