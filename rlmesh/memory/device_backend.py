"""The interface of a kind of device: how tensors in its memory become known to other processes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from rlmesh.memory.native import Buffer


class NotShareable(Exception):
    """This memory cannot be opened by other processes, as the text explains; it must go through host memory."""


class Handle(NamedTuple):
    """A name by which another process finds ``nbytes`` of a device.

    ``memory`` opens an allocation, in which the bytes begin at ``offset``; ``ready`` opens the event after which they
    may be read.
    """

    device: str
    memory: bytes
    offset: int
    nbytes: int
    ready: bytes


class Copy(Protocol):
    """A tensor that is being copied from another process's memory into this process's."""

    value: Any

    def wait(self) -> None:
        """Wait until the device has made the copy; may block."""
        ...

    def close(self) -> None:
        """Close the other process's memory."""
        ...


class Backend(Protocol):
    """A kind of device. ``dtype`` and ``shape`` are torch's."""

    def device_of(self, tensor: Any) -> str:
        """The name of a tensor's device, the same in all processes that see the device."""
        ...

    def snapshot(self, tensor: Any) -> Any:
        """A contiguous copy on the same device. Raises NotShareable if there is no room for the copy."""
        ...

    def handle(self, snapshot: Any) -> Handle:
        """The handle by which other processes open a snapshot. Raises NotShareable."""
        ...

    def open(self, handle: Handle, dtype: Any, shape: tuple[int, ...]) -> Copy:
        """Begin to copy the memory of a handle. Raises DeviceUnreachable."""
        ...

    def again(self, snapshot: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A new tensor with a snapshot's content, in the process that made the snapshot."""
        ...

    def to_host(self, source: Any) -> Buffer:
        """The bytes of a tensor or a snapshot. Blocks."""
        ...

    def from_host(self, buffer: Buffer, device: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A tensor on that device, or on the current device if it is not visible here. Raises DeviceUnreachable."""
        ...
