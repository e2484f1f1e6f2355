"""The contract of a channel: an outlet at the source, an inlet at each sink.

What happens to one bucket, in this order:

=========  ==================================================================================================
outlet     ``put``: take the tensors' bytes, or note where they are; checksums are made here
outlet     ``payload``: a small value per sink, which travels in the command that announces the bucket
outlet     ``transmit``: move the bytes, if the channel moves them at all; the commands are on their way by then
inlet      ``take``: the bucket's pieces; waits for bytes that are still coming, at most ``timeout_s``
inlet      ``ready``: they may be read; ``checksums``: what the source's are, once they have been
inlet      ``done``: the sink has copied what it needs
outlet     ``taken``: all sinks have answered, well or badly: the bucket's memory may be used again
outlet     ``captured``: after the last ``put`` with ``keep``: wait until the tensors may change
=========  ==================================================================================================

Outlets are made by ``open_outlet`` of their module, which listens or allocates; then every sink gets ``info`` and makes
its inlet by ``open_inlet``, while the outlet is in ``connect``. An outlet is used by one thread at a time, and so is an
inlet. ``close`` of either may come at any moment after, from any thread, and must leave nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlmesh.weights.planning.buckets import Bucket

SOONER = 0.9
"""A sender gives up this much sooner than the call that announced the bucket, and so can name the sink that is late."""


@dataclass(eq=False)
class BucketTransfer:
    """One bucket on its way. ``checksums`` are those of its entries, in their order: of each unit where they are in
    this machine's memory (`rlmesh.weights.transfer.checksum`), of each entry where they are on a GPU.
    """

    bucket: Bucket
    checksums: list[int]
    data: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """What both halves of a channel know.

    Attributes:
        session: names this plan of this `WeightSync`, in logs and file names.
        job_id, node_rank: in the names of shared memory, by which the node's guardian finds what was left.
        source: the member that sends.
        sinks: those that receive, in the order of their ranks in a group.
        keep: the bytes must outlive ``put``: the source does not wait for the sinks (a snapshot).
        timeout_s: how long a bucket, or a connection, may take.
        private: the operator's word that nobody else listens on the network.
        host: where the source listens for others, as an address.
        on_gpu: source and sinks have their weights on GPUs, each on one of its own.
        verify: checksums are made and compared.
        lasting: what the source gives are its weights themselves, which stay where they are; otherwise they are made
            for each push (gathered, merged).
        same_device: all sinks are on the GPU of the source.
        shares_events: and they see the /dev/shm of the source, where the driver keeps events.
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
        joins_bytes: neighbouring buckets may be put as one, up to so many bytes: (the first of a push, the others);
            0: each by itself.
        tells_only: ``transmit`` does nothing, since the command says all.
        while_full: set by whoever uses it: called while ``put`` waits for memory, since answers may have come; says
            whether a sink has failed, so that no memory is needed any more.
    """

    tells_only: bool = False
    while_full: Callable[[], bool] | None = None

    @property
    def joins_bytes(self) -> tuple[int, int]: ...

    def info(self, sink: str) -> Mapping[str, Any]:
        """What this sink needs to connect."""
        ...

    def connect(self) -> None:
        """Wait until all sinks are connected."""
        ...

    def put(self, bucket: Bucket, tensors: Mapping[str, Any]) -> BucketTransfer:
        """Take a bucket. With ``keep`` the tensors may change after ``captured``; otherwise only after ``taken``."""
        ...

    def captured(self) -> None:
        """With ``keep``: wait until all that was put is copied."""
        return

    def payload(self, parcel: BucketTransfer, sink: str) -> Any: ...

    def transmit(self, parcel: BucketTransfer, stopped: Callable[[], bool]) -> None:
        """Move the bytes. Whenever it waits it looks whether it is ``stopped``: a sink has answered that it failed.

        Raises:
            ChannelBroken: with the sink that could not be sent to, where one can be named.
        """
        ...

    def taken(self, parcel: BucketTransfer) -> None: ...

    def abandon(self) -> None:
        """The push failed: free what was taken for it, and let no sink wait for more. No push follows."""
        ...

    def close(self) -> None: ...


class ChannelReceiver(Protocol):
    """The receiving half, at one sink.

    Attributes:
        keeps: pieces stay valid for as long as somebody refers to them; otherwise until ``done``.
    """

    keeps: bool

    def take(self, bucket: Bucket, payload: Any, timeout_s: float) -> Sequence[Any]:
        """The pieces of the entries, in their order: ``[n]`` of uint8 each."""
        ...

    def ready(self) -> None:
        """Wait until the pieces taken last may be read: at most for the time that ``take`` was given."""
        return

    def checksums(self, sent: Sequence[int]) -> Sequence[int]:
        """The source's of the pieces taken last; ``sent`` came with the command."""
        return sent

    def done(self) -> None: ...

    def settle(self) -> None:
        """A push begins: nothing of the one before the last is used any more."""
        ...

    def close(self) -> None: ...


class ChannelBroken(Exception):
    """Bytes could not be moved; ``sink`` is whose end failed, if that is known."""

    def __init__(self, message: str, sink: str | None = None) -> None:
        super().__init__(message)
        self.sink = sink
