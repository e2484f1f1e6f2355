"""Shared memory: a bucket is written once for all sinks of a node, and read in place.

Sinks of one route verify together (`rlmesh.weights.transfer.tensor_bytes.BucketCheck`): sinks that use the memory
directly read the same pages, so each sums its own share of them. A sink that copies sums all that it copied.

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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from rlmesh.memory.attach import Attachments, writable
from rlmesh.memory.layout import DIRECTORY, Descriptor, SlotRelease
from rlmesh.memory.pool import PoolExhausted, SegmentPool
from rlmesh.weights.channels.base import BucketTransfer, ChannelBroken, ChannelReceiver, ChannelSender, RouteSettings
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.transfer.tensor_bytes import UNIT_BYTES, copy_with_checksums, host_bytes

if TYPE_CHECKING:
    from rlmesh.weights.transfer.tensor_bytes import Bytes

_POLL_S = 0.002
CHUNK_BYTES = 16 * UNIT_BYTES
"""A thread of `ParallelCopy` takes this much work at a time."""
MAX_THREADS = 4
"""More threads do not use more memory bandwidth, and other processes of the machine need cores."""


class ParallelCopy:
    """Copies and sums with several threads: the calling thread and a pool, whose threads start when first needed.

    One core cannot use a machine's whole memory bandwidth: it reaches 5 to 7 GB/s where two cores reach 12. NumPy and
    xxhash release the interpreter's lock. Work is cut into chunks, which idle threads take one after the other.

    Args:
        threads: 0: one per core, at most `MAX_THREADS`.
    """

    def __init__(self, threads: int = 0) -> None:
        self._others = (threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))) - 1
        self._pool = ThreadPoolExecutor(self._others, "rlmesh-weights-copy") if self._others else None

    def copy(self, work: Sequence[tuple[Bytes, Bytes]], *, summed: bool) -> list[list[int]]:
        """Copy (from, to) pairs of ``[n]`` bytes; returns the checksums of each pair's copy, if ``summed``."""
        chunks: list[tuple[int, Bytes, Bytes]] = []
        for pair, (source, target) in enumerate(work):
            starts = range(0, max(1, source.nbytes), CHUNK_BYTES)
            chunks += [(pair, source[at : at + CHUNK_BYTES], target[at : at + CHUNK_BYTES]) for at in starts]
        if len(chunks) == len(work):
            return self._copy_chunks(chunks, summed)
        sums: list[list[int]] = [[] for _ in work]
        for (pair, _, _), found in zip(chunks, self._copy_chunks(chunks, summed), strict=True):
            sums[pair] += found
        return sums

    def _copy_chunks(self, chunks: Sequence[tuple[int, Bytes, Bytes]], summed: bool) -> list[list[int]]:
        import numpy as np

        found: list[list[int]] = [[]] * len(chunks)
        waiting = deque(range(len(chunks)))

        def take_chunks() -> None:
            while waiting:
                try:
                    chunk = waiting.popleft()
                except IndexError:
                    return  # another thread took the last chunk
                _, source, target = chunks[chunk]
                if summed:
                    found[chunk] = copy_with_checksums(source, target)
                else:
                    np.copyto(target, source)

        count = min(self._others, len(chunks) - 1)
        others = [self._pool.submit(take_chunks) for _ in range(count)] if self._pool is not None else []
        try:
            take_chunks()
        finally:
            waiting.clear()  # if a copy failed, the other threads stop too
            if others:
                wait(others)
        for other in others:
            other.result()
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)


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
                # Sinks that copy release slots one after the other: wait for one. Sinks that keep slots release none.
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
