"""Shared memory: a bucket is written once for all sinks of a node, and read in place.

Sinks of one route verify together (`rlmesh.weights.transfer.staging.BucketCheck`): sinks that use the memory directly
read the same pages, so each sums its own share of them. A sink that copies sums all that it copied.

The sender puts each bucket into a slot of a pool of reused segments (`rlmesh.memory`). The sinks map the slot and hold
its lock; a `double_buffer` sink on a CPU may use that memory as its weights until the next flip, so that nothing is
copied out. No message tells the sender that a slot is free: the kernel reports whether a lock is held, also after a
sink has died.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlmesh.memory.attach import Attachments, writable
from rlmesh.memory.layout import DIRECTORY, Descriptor, SlotRelease
from rlmesh.memory.pool import PoolExhausted, SegmentPool
from rlmesh.weights.channels.base import BucketTransfer, ChannelBroken, ChannelReceiver, ChannelSender, RouteSettings
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.transfer.tensor_bytes import ParallelCopy, host_bytes

_POLL_S = 0.002


class _BucketFiller:
    """Writes a bucket's tensors into a slot of the pool, and makes their checksums on the way if ``summed``."""

    def __init__(self, bucket: Bucket, tensors: Mapping[str, Any], summed: bool, copier: ParallelCopy) -> None:
        self._bucket, self._tensors, self._summed, self._copier = bucket, tensors, summed, copier
        self.checksums: list[int] = []
        self.nbytes = max(bucket.nbytes, 1)

    def fill(self, into: memoryview) -> None:
        import numpy as np

        target = np.frombuffer(into, np.uint8)
        work = [
            (host_bytes(self._tensors[entry.name], entry.dtype), target[entry.offset : entry.offset + entry.nbytes])
            for entry in self._bucket.entries
        ]
        self.checksums = [one for each in self._copier.copy(work, summed=self._summed) for one in each]


class ShmSender(ChannelSender):
    """See `channels.base.ChannelSender`."""

    joins_bytes = 0, 0
    tells_only = True

    def __init__(
        self, settings: RouteSettings, *, directory: str = DIRECTORY, clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        plain = re.sub("[^A-Za-z0-9_]", ".", settings.source)
        owner = f"n{settings.node_rank}-weights-{plain}-{os.getpid()}-{secrets.token_hex(3)}"
        self._settings, self._clock, self._wait = settings, clock, wait
        self.pool = SegmentPool(settings.job_id, owner, directory=directory)
        self._copier = ParallelCopy()
        self._directory = directory

    def info(self, sink: str) -> Mapping[str, Any]:
        return {"job_id": self._settings.job_id, "directory": self._directory}

    def put(self, bucket: Bucket, tensors: Mapping[str, Any]) -> BucketTransfer:
        settings = self._settings
        filler = _BucketFiller(bucket, tensors, settings.verify, self._copier)
        frame = self._written(filler, bucket.index, self._clock() + settings.timeout_s)
        references = {sink: self.pool.add_ref(frame, sink) for sink in settings.sinks}
        return BucketTransfer(bucket, filler.checksums, references)

    def _written(self, filler: _BucketFiller, bucket: int, deadline: float) -> memoryview:
        while True:
            try:
                return self.pool.put([filler])[0]
            except PoolExhausted as error:
                # Sinks that copy release slots one after the other; sinks that keep them never do.
                if not self.pool.stats().slots or self._clock() >= deadline:
                    raise ChannelBroken(
                        f"bucket {bucket} finds no room in shared memory: {error}. Smaller buckets with in_place "
                        "sinks, or sinks with keep_shared=False, need room for two buckets only"
                    ) from error
                if self.while_full is not None and self.while_full():
                    raise ChannelBroken(f"bucket {bucket} is not needed any more") from error
                self._wait(_POLL_S)

    def payload(self, transfer: BucketTransfer, sink: str) -> Any:
        return list(transfer.data[sink])

    def taken(self, transfer: BucketTransfer) -> None:
        for sink, reference in transfer.data.items():
            self.pool.release([SlotRelease(reference.segment, reference.slot, reference.generation, 1)], sink)
        transfer.data = {}

    def abandon(self) -> None:
        for sink in self._settings.sinks:
            self.pool.receiver_lost(sink)
        self.pool.trim(0.0)

    def close(self) -> None:
        self.pool.close()
        self._copier.close()


class ShmReceiver(ChannelReceiver):
    """See `channels.base.ChannelReceiver`."""

    keeps = True

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._attachments = Attachments(info["job_id"], on_ended=lambda: None, directory=info["directory"])

    def take(self, bucket: Bucket, payload: Any, timeout_s: float) -> Sequence[Any]:
        import numpy as np

        view = self._attachments.borrow(Descriptor.parse(payload), "source")
        data = np.frombuffer(writable(view), np.uint8)
        return [data[entry.offset : entry.offset + entry.nbytes] for entry in bucket.entries]

    def done(self) -> None:
        self._attachments.collect()

    def settle(self) -> None:
        self._attachments.collect()
        self._attachments.forget_removed()

    def close(self) -> None:
        self._attachments.collect()
        self._attachments.close()


def open_sender(settings: RouteSettings) -> ShmSender:
    return ShmSender(settings)


def open_receiver(settings: RouteSettings, sink: str, info: Mapping[str, Any]) -> ShmReceiver:
    return ShmReceiver(info)
