"""CUDA IPC: sinks on the same GPU, or on one that reaches it, copy from the source's own memory.

The weights of a fenced source at lasting addresses are read in place: nothing is copied at the source, and their
handles are opened once. Weights that are gathered, cast or snapshotted are copied into memory of the sender: two
buffers that alternate, or one per bucket with a snapshot. Weights in memory without handles (expandable segments) are
detected in ``put`` and copied too.

A snapshot on one GPU is announced when its copy has begun: the sink prepares its own copy meanwhile, polls an event
until the source's copy has ended, and finds the checksums in the same memory, after the tensors. The sink's GPU does
not wait for the event: if the source were killed, nothing could end that wait. So the sink polls the source's process
too.

All buckets are put as one (one message, one launch), unless they take turns in the sender's two buffers, or may have
to: before the first push it is unknown whether they can be read in place. They are put as two parts only if the source
must run a kernel first (checksums, a snapshot) and a sink is on another GPU: the kernel for the second part then runs
during the transfer of the first, which takes ten times as long as the kernel. On one GPU the two would only alternate.

No sink reads freed memory: a sink answers when its copy has ended, and closes its handles before the source frees
memory (`SyncSession.close` waits for that).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmesh.errors import DeviceUnreachable
from rlmesh.runtime.calling.peer_status import lives
from rlmesh.weights.channels.base import (
    SEND_TIMEOUT_SHARE,
    BucketTransfer,
    ChannelBroken,
    ChannelReceiver,
    ChannelSender,
    RouteSettings,
)
from rlmesh.weights.cuda.copies import AddressedTensors, copy, start
from rlmesh.weights.cuda.devices import MASK, index_of, uuid_of
from rlmesh.weights.cuda.memory import OpenedAllocations, ShareableAllocation, Unshareable, export, this_process
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.transfer.tensor_bytes import dtype_name

logger = logging.getLogger(__name__)

BUFFERS = 2
ALL_BYTES = 1 << 62
FIRST_BYTES = 2 << 30
POLL_S = 5e-5
POLLS_PER_PROCESS_CHECK = 100
"""Polls of the event between two checks of the source's process."""

_events: dict[bytes, Any] = {}
"""The events of this process, by handle: a process cannot open its own handles."""


@dataclass(eq=False)
class _BucketMemory:
    """The memory in which sinks find a bucket's tensors: handle and offset of each tensor.

    Attributes:
        addresses: this process's addresses of the memory: of the tensors themselves, or of their copies in ``own``.
        freed: torch's count of segments given back to the driver when the tensors' own addresses were found. If the
            count has changed, the same address may belong to another allocation. 0 for copies.
        own: the sender's allocation, if tensors are copied into it.
        targets, dtypes: the tensors' places in ``own``, and their types.
        ready: the event after which the copy may be read, if it is announced before that.
        sums: the checksums of an announced copy, ``[n]`` of int64 in ``own``, after the tensors.
    """

    serial: int
    places: list[tuple[bytes, int]]
    addresses: tuple[int, ...] = ()
    freed: int = 0
    own: ShareableAllocation | None = None
    targets: Sequence[Any] = ()
    dtypes: Sequence[Any] = ()
    ready: Any = None
    sums: Any = None


def _freed(device: Any) -> int:
    """The number of segments of a GPU that torch has given back to the driver."""
    import torch

    return int(torch.cuda.memory_stats_as_nested_dict(device)["segment"]["all"]["freed"])


class CudaIpcSender(ChannelSender):
    """See `channels.base.ChannelSender`."""

    tells_only = True

    def __init__(self, settings: RouteSettings) -> None:
        self._settings = settings
        self._own: dict[int, ShareableAllocation] = {}
        self._direct = settings.lasting and not settings.keep
        # Copies are announced before they have ended only for weights at lasting addresses: tensors that were gathered
        # for this push may be freed too early.
        self._early = settings.lasting and settings.keep and settings.same_device and settings.shares_events
        self._running: list[Any] = []
        self._device = ""
        self._serial = 0
        # By bucket: the memory that its last put found. In a steady state every push finds the same.
        self._known: dict[int, _BucketMemory] = {}
        self._announced: dict[tuple[str, int], int] = {}

    @property
    def joins_bytes(self) -> tuple[int, int]:
        settings = self._settings
        if not settings.keep and not (self._direct and self._known):
            return 0, 0  # before the first push it is unknown whether the weights can be read in place
        works_first = settings.keep or settings.verify
        return FIRST_BYTES if works_first and not settings.same_device else ALL_BYTES, ALL_BYTES

    def info(self, sink: str) -> Mapping[str, Any]:
        return {}

    def put(self, bucket: Bucket, tensors: Mapping[str, Any]) -> BucketTransfer:
        import torch

        whole = AddressedTensors(map(tensors.__getitem__, bucket.names))
        device = next((tensor.device for tensor in whole if tensor.is_cuda), None)
        if device is None:
            raise ChannelBroken(f"bucket {bucket.index} is not on a GPU")
        self._device = str(device)
        with torch.cuda.device(device), torch.no_grad():
            places = self._places(bucket, whole) if self._direct else None
            sums: list[int] = []
            if places is None:
                places, sums = self._copy(bucket, whole)
            elif self._settings.verify:
                sums = copy(whole, None, bucket.sizes, summed=True)
            if places.ready is None:
                # The sinks read from other processes, which do not wait for this process's streams.
                stream = torch.cuda.current_stream()
                if not stream.query():  # a query is faster than synchronizing an idle stream
                    stream.synchronize()
        return BucketTransfer(bucket, sums, (places, whole))

    def captured(self) -> None:
        running, self._running = self._running, []
        for event in running:
            event.synchronize()

    def _places(self, bucket: Bucket, whole: AddressedTensors) -> _BucketMemory | None:
        """Handle and offset of each tensor in place; None if the tensors must be copied."""
        import torch

        addresses = whole.addresses
        known, freed = self._known.get(bucket.index), _freed(whole[0].device)
        same = known is not None and known.addresses == addresses and known.freed == freed
        if known is not None and same and all(map(torch.Tensor.is_contiguous, whole)):
            return known
        for entry, tensor in zip(bucket.entries, whole, strict=True):
            if not tensor.is_cuda or not tensor.is_contiguous() or dtype_name(tensor) != entry.dtype:
                self._direct = False
                return None
            if tensor.nbytes != entry.nbytes:
                raise ChannelBroken(f"{entry.name} has {tensor.nbytes:,} bytes now; it had {entry.nbytes:,}")
        try:
            places = [export(tensor) for tensor in whole]
        except Unshareable as error:
            logger.warning("the weights of %s are copied before they are shared, since %s (expandable segments?)",
                           self._settings.source, error)  # fmt: skip
            self._direct = False
            return None
        if known is None or known.places != places:
            known = self._remember(bucket, places)
        known.addresses, known.freed = addresses, freed
        return known

    def _remember(self, bucket: Bucket, places: list[tuple[bytes, int]]) -> _BucketMemory:
        self._serial += 1
        self._forget_event(bucket.index)
        found = self._known[bucket.index] = _BucketMemory(self._serial, places)
        return found

    def _forget_event(self, index: int) -> None:
        known = self._known.get(index)
        if known is not None and known.ready is not None:
            _events.pop(known.ready.ipc_handle(), None)

    def _copy(self, bucket: Bucket, whole: AddressedTensors) -> tuple[_BucketMemory, list[int]]:
        import torch

        which = bucket.index if self._settings.keep else bucket.index % BUFFERS
        own = self._own.get(which)
        sums_at = -(-bucket.nbytes // 8) * 8
        nbytes = sums_at + 8 * len(bucket.entries)
        if own is None or own.nbytes < nbytes:
            if own is not None:
                self._own.pop(which).free()
            own = self._own[which] = ShareableAllocation(nbytes, torch.device(self._device).index or 0)
        known = self._known.get(bucket.index)
        if known is None or known.own is not own:
            known = self._remember(bucket, [(own.handle, entry.offset) for entry in bucket.entries])
            known.own = own
            known.targets = AddressedTensors(own.tensor(entry.offset, entry.nbytes) for entry in bucket.entries)
            known.addresses = known.targets.addresses
            known.dtypes = [getattr(torch, entry.dtype) for entry in bucket.entries]
            if self._early:
                known.sums = own.tensor(sums_at, 8 * len(bucket.entries)).view(torch.int64)
                known.ready = torch.cuda.Event(interprocess=True)
                _events[known.ready.ipc_handle()] = known.ready
        fit = all(t.dtype is d and t.is_cuda and t.is_contiguous() for t, d in zip(whole, known.dtypes, strict=True))
        ready: Sequence[Any] = whole if fit else [
            tensor.to(device=self._device, dtype=dtype).contiguous()
            for tensor, dtype in zip(whole, known.dtypes, strict=True)
        ]  # fmt: skip
        verify, sums = self._settings.verify, list[int]()
        if known.ready is None or not start(ready, known.targets, bucket.sizes, known.sums if verify else None):
            sums = copy(ready, known.targets, bucket.sizes, summed=verify)
        if known.ready is not None:
            known.ready.record()
            self._running.append(known.ready)
        return known, sums

    def payload(self, transfer: BucketTransfer, sink: str) -> Any:
        known, index = transfer.data[0], transfer.bucket.index
        if self._announced.get((sink, index)) == known.serial:
            return [known.serial]
        # The sink knows the handles from now on: another push uses this session only if the sink has taken this one.
        self._announced[sink, index] = known.serial
        handles = list(dict.fromkeys(handle for handle, _ in known.places))
        number = {handle: i for i, handle in enumerate(handles)}
        import torch

        uuid = uuid_of(torch.device(self._device).index or 0)
        places = [
            (number[handle], offset, address)
            for (handle, offset), address in zip(known.places, known.addresses, strict=True)
        ]
        event = None
        if known.ready is not None:
            offset = known.sums.data_ptr() - known.own.address
            event = known.ready.ipc_handle(), os.getpid(), (0, offset, known.sums.data_ptr()), len(known.addresses)
        return [known.serial, uuid, this_process(), handles, places, event]

    def close(self) -> None:
        for index in self._known:
            self._forget_event(index)
        self._known.clear()
        own, self._own = self._own, {}
        for allocation in own.values():
            allocation.free()


@dataclass(frozen=True, slots=True)
class _OpenedBucket:
    """A bucket's pieces in memory of the source that this sink has open. Tensors may share handles.

    Attributes:
        ready: the source's event after which the pieces may be read; None: at once.
        source: pid of the process that records the event; 0: it is not visible from here.
        sums: the memory of the checksums.
    """

    serial: int
    handles: frozenset[bytes]
    pieces: Sequence[Any]
    ready: Any = None
    source: int = 0
    sums: Any = None


class CudaIpcReceiver(ChannelReceiver):
    """See `channels.base.ChannelReceiver`."""

    keeps = False
    late = True

    def __init__(
        self, sink: str, *, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], object] = time.sleep
    ) -> None:
        import torch

        self._sink, self._clock, self._wait = sink, clock, wait
        self._index = torch.cuda.current_device()
        self._opened = OpenedAllocations(self._index)
        self._used: set[int] = set()
        self._known: dict[int, _OpenedBucket] = {}
        self._all_used = False
        self._taken: _OpenedBucket | None = None
        self._until = 0.0

    def take(self, bucket: Bucket, payload: Any, timeout_s: float) -> Sequence[Any]:
        serial, *rest = payload
        self._until = self._clock() + SEND_TIMEOUT_SHARE * timeout_s
        known = self._known.get(bucket.index)
        if known is None or known.serial != serial:
            if not rest:
                raise ChannelBroken(f"{self._sink} did not get the location of bucket {bucket.index}", self._sink)
            known = self._known[bucket.index] = self._open(bucket, serial, *rest)
            self._all_used = False
        self._used.add(bucket.index)
        self._taken = known
        return known.pieces

    def _open(
        self, bucket: Bucket, serial: int, uuid: str, process: bytes, handles: Sequence[bytes],
        places: Sequence[tuple[int, int, int]], event: Any,
    ) -> _OpenedBucket:  # fmt: skip
        """Open the memory that `CudaIpcSender.payload` describes."""
        from rlmesh.memory.cuda import bytes_at, open_event

        try:
            device = self._device_of(uuid)
            here = process == this_process()
            bases = [0 if here or not handle else self._opened.address(handle) for handle in handles]

            def address_of(place: tuple[int, int, int]) -> int:
                number, offset, address = place
                return address if here else bases[number] + offset

            addresses = [address_of(place) for place in places]
            ready, source, sums = None, 0, None
            if event is not None:
                handle, pid, place, count = event
                source = pid if lives(pid) else 0
                ready = _events[handle] if here else open_event(device, handle)
                sums = bytes_at(address_of(place), 8 * count, device, self)
        except (Unshareable, DeviceUnreachable) as error:
            raise ChannelBroken(
                f"{self._sink} cannot open the source's memory (WeightSync(channel='shm') goes through host memory "
                f"instead): {error}",
                self._sink,
            ) from error
        pieces = AddressedTensors(
            (bytes_at(address, size, device, self) for address, size in zip(addresses, bucket.sizes, strict=True)),
            addresses,
        )
        return _OpenedBucket(serial, frozenset(handle for handle in handles if handle), pieces, ready, source, sums)

    def _device_of(self, uuid: str) -> str:
        """The device of opened memory. If a mask hides the memory's GPU, it is the device that opened it: this is how
        CUDA shows such memory, and how kernels and copies reach it."""
        try:
            return f"cuda:{index_of(uuid)}"
        except LookupError:
            return f"cuda:{self._index}"

    def ready(self) -> None:
        taken = self._taken
        if taken is None or taken.ready is None:
            return
        polls = 0
        while not taken.ready.query():
            polls += 1
            if polls % POLLS_PER_PROCESS_CHECK == 0:
                self._check_source(taken)
            if self._clock() > self._until:
                raise ChannelBroken("the source has not made its snapshot in time: is its GPU busy with other work?")
            self._wait(POLL_S)
        self._check_source(taken)  # a dead process's event is not trusted

    def _check_source(self, taken: _OpenedBucket) -> None:
        if taken.source and not lives(taken.source):
            raise ChannelBroken(f"the source (pid {taken.source}) ended before it had made its snapshot")

    def checksums(self, sent: Sequence[int]) -> Sequence[int]:
        import torch

        sums = self._taken.sums if self._taken is not None else None
        return sent if sent or sums is None else [value & MASK for value in sums.view(torch.int64).tolist()]

    def settle(self) -> None:
        """Close memory that the last push did not use: the source may have freed it."""
        if not self._all_used or self._used != self._known.keys():
            self._known = {index: known for index, known in self._known.items() if index in self._used}
            self._opened.keep_only(handle for known in self._known.values() for handle in known.handles)
        self._all_used, self._used, self._taken = True, set(), None

    def close(self) -> None:
        self._known.clear()
        self._taken = None
        self._opened.close()


def open_sender(settings: RouteSettings) -> CudaIpcSender:
    return CudaIpcSender(settings)


def open_receiver(settings: RouteSettings, sink: str, info: Mapping[str, Any]) -> CudaIpcReceiver:
    return CudaIpcReceiver(sink)
