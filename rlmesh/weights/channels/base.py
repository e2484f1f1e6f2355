"""The contract of a channel: a `ChannelSender` at the source, a `ChannelReceiver` at each sink.

The life of one bucket, in this order:

=========  ==================================================================================================
sender     ``put``: take the tensors' bytes, or note where they are; make checksums
sender     ``payload``: a small value per sink, which travels in the command that announces the bucket
sender     ``transmit``: move the bytes, if the channel moves any; the commands are on their way already
receiver   ``take``: the bucket's pieces; waits for bytes that are still coming, at most ``timeout_s``
receiver   if it is ``late``, ``ready``: wait until pieces may be read; ``checksums``: known from then on
receiver   ``done``: the sink has copied what it needs
sender     ``taken``: all sinks have answered, well or badly: the bucket's memory may be reused
sender     ``captured``: after the last ``put`` with ``keep``: wait until the tensors may change
=========  ==================================================================================================

A channel's module has ``open_sender``, which listens or allocates; then every sink gets ``info`` and calls
``open_receiver``, while the sender is in ``connect``. One thread at a time uses a sender or a receiver. ``close`` of
either may come at any later moment, from any thread, and must leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from rlmesh.weights.planning.buckets import Bucket
from rlmesh.weights.planning.plan import Channel

SEND_TIMEOUT_SHARE = 0.9
"""Share of a bucket's timeout after which its sender gives up: before the announcing call, to name the late sink."""

_MODULES: Mapping[Channel, str] = {
    "shm": "rlmesh.weights.channels.shm",
    "cuda_ipc": "rlmesh.weights.channels.cuda_ipc",
    "collective": "rlmesh.weights.channels.collective",
    "stream": "rlmesh.weights.channels.tcp_stream",
}
"""The module of each channel, imported on first use, since some need torch."""


@dataclass(eq=False)
class BucketTransfer:
    """One bucket on its way.

    Attributes:
        checksums: of the entries, in their order: one per unit in host memory
            (`rlmesh.weights.transfer.tensor_bytes`), one per entry on a GPU.
        data: the channel's own.
    """

    bucket: Bucket
    checksums: list[int]
    data: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """Settings that the sender and the receivers of a route share.

    Attributes:
        session: names this plan of this `WeightSync`, in logs and file names.
        job_id, node_rank: parts of the names of shared memory. By them the node's guardian, which cleans up after
            crashes, finds leftovers.
        source: the member that sends.
        sinks: the members that receive, in the order of their ranks in a group.
        keep: the bytes must outlive ``put``: the source does not wait for the sinks (a snapshot).
        timeout_s: deadline of a bucket, and of a connection.
        private: the operator vouches that the network is private.
        host: the address at which the source listens.
        on_gpu: source and sinks have their weights on GPUs, each on a GPU of its own.
        verify: checksums are made and compared.
        lasting: the source gives its own tensors, whose addresses stay the same; otherwise it makes copies for each
            push (gathered, merged).
        same_device: all sinks are on the GPU of the source.
        shares_events: all sinks see the source's /dev/shm, where the driver keeps events.
    """

    session: str
    job_id: str
    node_rank: int
    source: str
    sinks: tuple[str, ...]
    keep: bool
    timeout_s: float
    private: bool = False
    host: str = "127.0.0.1"
    on_gpu: bool = False
    verify: bool = True
    lasting: bool = False
    same_device: bool = False
    shares_events: bool = False


class ChannelSender(Protocol):
    """The sending half, for all sinks of one route.

    Attributes:
        joins_bytes: two limits in bytes up to which neighbouring buckets are put as one: for the first put of a push,
            and for the others; 0: each bucket by itself.
        tells_only: ``transmit`` does nothing: the announcing command carries everything.
        while_full: set by the user of the channel, and called while ``put`` waits for memory, to process answers;
            returns true if a sink has failed, so that no memory is needed any more.
    """

    tells_only: bool = False
    while_full: Callable[[], bool] | None = None

    @property
    def joins_bytes(self) -> tuple[int, int]: ...

    def info(self, sink: str) -> Mapping[str, Any]:
        """The data that this sink needs to connect."""
        ...

    def connect(self) -> None:
        """Wait until all sinks are connected."""
        return

    def put(self, bucket: Bucket, tensors: Mapping[str, Any]) -> BucketTransfer:
        """Take a bucket. With ``keep`` the tensors may change after ``captured``, otherwise only after ``taken``."""
        ...

    def captured(self) -> None:
        """Wait until all buckets that were put with ``keep`` are copied."""
        return

    def payload(self, transfer: BucketTransfer, sink: str) -> Any:
        """The value that travels to ``sink`` with the announcement."""
        return None

    def transmit(self, transfer: BucketTransfer, stopped: Callable[[], bool]) -> None:
        """Move the bytes. Polls ``stopped`` while it waits: true if a sink has answered that it failed.

        Raises:
            ChannelBroken: with the sink that could not be sent to, if it is known.
        """
        return

    def taken(self, transfer: BucketTransfer) -> None:
        """All sinks have answered: the bucket's memory may be reused."""
        transfer.data = None

    def abandon(self) -> None:
        """The push failed: free its memory, and let no sink wait for more. No push follows."""
        return

    def close(self) -> None: ...


class ChannelReceiver(Protocol):
    """The receiving half, at one sink.

    Attributes:
        keeps: pieces stay valid for as long as they are referred to; otherwise until ``done``.
        late: the pieces may be read once ``ready`` has returned, and ``checksums`` gives the source's checksums then;
            otherwise both are there when ``take`` returns.
    """

    keeps: bool
    late: bool = False

    def take(self, bucket: Bucket, payload: Any, timeout_s: float) -> Sequence[Any]:
        """The pieces of the entries, in their order: ``[n]`` of uint8 each.

        Raises:
            ChannelBroken: they did not arrive.
        """
        ...

    def ready(self) -> None:
        """Wait until the pieces taken last may be read, within the time that ``take`` was given."""
        return

    def checksums(self, sent: Sequence[int]) -> Sequence[int]:
        """The source's checksums of the pieces taken last; ``sent`` came with the command."""
        return sent

    def done(self) -> None:
        """The sink has copied what it needs of the pieces taken last."""
        return

    def settle(self) -> None:
        """A push begins: nothing of the push before the last one is used any more."""
        return

    def close(self) -> None: ...


class ChannelBroken(Exception):
    """Bytes could not be moved; ``sink`` is the sink whose side failed, if it is known."""

    def __init__(self, message: str, sink: str | None = None) -> None:
        super().__init__(message)
        self.sink = sink


def open_sender(channel: Channel, settings: RouteSettings) -> ChannelSender:
    sender: ChannelSender = import_module(_MODULES[channel]).open_sender(settings)
    return sender


def open_receiver(channel: Channel, settings: RouteSettings, sink: str, info: Mapping[str, Any]) -> ChannelReceiver:
    receiver: ChannelReceiver = import_module(_MODULES[channel]).open_receiver(settings, sink, info)
    return receiver
