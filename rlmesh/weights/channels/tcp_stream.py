"""Streams: a connection from the source to each sink, for nodes that share no memory.

On a private network (``RLMESH_PRIVATE_NETWORK=1``) and on loopback the connection is plain TCP: each side proves that
it knows the session's secret, which came with the commands, before weights are sent. Elsewhere it is ZeroMQ under
CURVE, with keys derived from that secret (`authenticated_stream`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlmesh.weights.channels.authenticated_stream import CurveListener, CurvePipe, Pipe, PlainListener, PlainPipe
from rlmesh.weights.channels.base import (
    SEND_TIMEOUT_SHARE,
    BucketTransfer,
    ChannelBroken,
    ChannelReceiver,
    ChannelSender,
    RouteSettings,
)
from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.transfer.tensor_bytes import checksums, host_bytes

LOOPBACK = ("127.", "::1", "localhost")


class StreamSender(ChannelSender):
    """See `channels.base.ChannelSender`."""

    joins_bytes = 0, 0

    def __init__(self, settings: RouteSettings) -> None:
        self._settings = settings
        self._secret = secrets.token_bytes(32)
        plain = settings.private or settings.host.startswith(LOOPBACK)
        listen: Callable[[str, bytes], PlainListener | CurveListener] = PlainListener if plain else CurveListener
        self._listeners = {sink: listen(settings.host, self._secret) for sink in settings.sinks}
        self._pipes: dict[str, Pipe] = {}
        self._threads = ThreadPoolExecutor(len(settings.sinks), "rlmesh-weights-stream")

    def info(self, sink: str) -> Mapping[str, Any]:
        listener = self._listeners[sink]
        return {"plain": isinstance(listener, PlainListener), "address": listener.address, "secret": self._secret}

    def connect(self) -> None:
        for sink, listener in self._listeners.items():
            try:
                self._pipes[sink] = listener.accept(self._settings.timeout_s)
            except OSError as error:
                raise ChannelBroken(
                    f"{sink} did not connect to {listener.address} within {self._settings.timeout_s:g} s: {error}", sink
                ) from error

    def put(self, bucket: Bucket, tensors: Mapping[str, Any]) -> BucketTransfer:
        pieces = []
        for entry in bucket.entries:
            data = host_bytes(tensors[entry.name], entry.dtype)
            pieces.append(data.copy() if self._settings.keep else data)
        sums = [one for piece in pieces for one in checksums(piece)] if self._settings.verify else []
        return BucketTransfer(bucket, sums, pieces)

    def transmit(self, transfer: BucketTransfer, stopped: Callable[[], bool]) -> None:
        buffers = [memoryview(piece) for piece in transfer.data if piece.nbytes]

        def send(sink: str) -> None:
            try:
                self._pipes[sink].send(buffers, SEND_TIMEOUT_SHARE * self._settings.timeout_s, stopped)
            except OSError as error:
                raise ChannelBroken(f"bytes could not be sent to {sink}: {error}", sink) from error

        if len(self._settings.sinks) == 1:
            send(self._settings.sinks[0])
            return
        for sending in [self._threads.submit(send, sink) for sink in self._settings.sinks]:
            sending.result()

    def abandon(self) -> None:
        """Close the connections, at which the sinks stop waiting."""
        self.close()

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for listener in self._listeners.values():
            listener.close()
        self._threads.shutdown(wait=True)


class StreamReceiver(ChannelReceiver):
    """See `channels.base.ChannelReceiver`. Every bucket is read into the same buffer."""

    keeps = False

    def __init__(self, settings: RouteSettings, info: Mapping[str, Any]) -> None:
        made: Callable[[str, bytes, float], Pipe] = PlainPipe.to if info["plain"] else CurvePipe.to
        self._pipe = made(info["address"], info["secret"], settings.timeout_s)
        self._buffer: Any = None

    def take(self, bucket: Bucket, payload: Any, timeout_s: float) -> Sequence[Any]:
        import numpy as np

        if self._buffer is None or self._buffer.nbytes < bucket.nbytes:
            self._buffer = np.empty(bucket.nbytes, np.uint8)
        pieces = [self._buffer[entry.offset : entry.offset + entry.nbytes] for entry in bucket.entries]
        try:
            self._pipe.receive([memoryview(piece) for piece in pieces if piece.nbytes], timeout_s)
        except OSError as error:
            raise ChannelBroken(f"bucket {bucket.index} did not arrive whole: {error}") from error
        return pieces

    def close(self) -> None:
        self._pipe.close()
        self._buffer = None


def open_sender(settings: RouteSettings) -> StreamSender:
    return StreamSender(settings)


def open_receiver(settings: RouteSettings, sink: str, info: Mapping[str, Any]) -> StreamReceiver:
    return StreamReceiver(settings, info)
