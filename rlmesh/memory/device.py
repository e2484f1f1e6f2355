"""Transfers tensors in the memory of a device between processes of one node. Does not import torch.

The message carries a *ticket*: the place on the device of a copy of the tensor, which the sender made when the call was
made (`Exported`), so that it may change its tensor at once. A ticket lies in a slot of shared memory and is
reference-counted like any other buffer, which makes its end safe:

1. The receiver opens the sender's memory, copies it into its own memory, waits until the device has made the copy,
   closes the sender's memory, and only then drops the ticket: the release of the slot means "closed".
2. The sender frees its copy when the last receiver's reference has ended, never before.

The references of a receiver that dies end as they do for every slot (its link is lost, and the kernel drops its lock
when the process is gone). A sender that dies takes its memory with it; the receivers' copies are their own. For a peer
on another node, the bytes go through host memory instead (`contents`).

A `Backend` makes the device's calls: `cuda` has the real one, tests have one without a device.
"""

from __future__ import annotations

import ctypes
import json
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rlmesh.errors import DeviceUnreachable, MalformedFrame
from rlmesh.memory.device_backend import Backend, Copy, Handle, NotShareable
from rlmesh.memory.native import Buffer, owner_of

logger = logging.getLogger(__name__)

TICKET_BYTES = 4096
MIN_BYTES = 64 << 10
"""Smaller tensors go through host memory: opening the sender's memory would take longer."""
_WARN_EVERY_S = 60.0
_IDLE_S = 1.0


_backends: dict[str, Backend] = {}


def register(kind: str, backend: Backend | None) -> None:
    """Use a backend for tensors whose ``device.type`` is ``kind``; None removes it."""
    if backend is None:
        _backends.pop(kind, None)
    else:
        _backends[kind] = backend


def backend_for(kind: str) -> Backend | None:
    """The backend for a kind of device, made when first needed; None if the kind has none.

    Raises:
        DeviceUnreachable: this process has no such device.
    """
    found = _backends.get(kind)
    if found is None and kind == "cuda":
        from rlmesh.memory.cuda import CudaBackend

        found = _backends[kind] = CudaBackend()
    return found


# The sender.


class Exported:
    """A snapshot that other processes may open for as long as this object lives."""

    def __init__(self, backend: Backend, snapshot: Any, handle: Handle) -> None:
        self.backend, self.snapshot, self.nbytes = backend, snapshot, handle.nbytes
        self.number = secrets.randbits(63)
        self._host: Buffer | None = None
        self._handle = handle
        _exported[self.number] = self

    def ticket(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The ticket, as an object with a buffer that keeps this object alive."""
        handle = self._handle
        fields = {
            "number": self.number, "device": handle.device, "memory": handle.memory.hex(), "offset": handle.offset,
            "nbytes": handle.nbytes, "ready": handle.ready.hex(),
        }  # fmt: skip
        text = json.dumps(fields).encode()
        buffer = (ctypes.c_ubyte * TICKET_BYTES).from_buffer(bytearray(text.ljust(TICKET_BYTES)))
        vars(buffer)["owner"] = self
        return buffer

    def contents(self) -> Buffer:
        """The tensor's bytes, for peers that cannot open the ticket. Blocks."""
        if self._host is None:
            self._host = self.backend.to_host(self.snapshot)
        return self._host


_exported: weakref.WeakValueDictionary[int, Exported] = weakref.WeakValueDictionary()
_warned_at: float | None = None


def export(backend: Backend, tensor: Any, nbytes: int) -> Buffer | ctypes.Array[ctypes.c_ubyte]:
    """A tensor's ticket, or its bytes if it is small or cannot be shared. Blocks for bytes."""
    if nbytes < MIN_BYTES:
        return backend.to_host(tensor)
    try:
        snapshot = backend.snapshot(tensor)
        return Exported(backend, snapshot, backend.handle(snapshot)).ticket()
    except NotShareable as error:
        global _warned_at
        now = time.monotonic()
        if _warned_at is None or now - _warned_at >= _WARN_EVERY_S:
            _warned_at = now
            logger.warning("tensors go through host memory, which is many times slower: %s", str(error))
        return backend.to_host(tensor)


def exported_of(frame: object) -> Exported | None:
    """The exported snapshot of a frame that is a ticket of this process; None for other frames."""
    if type(frame) is not memoryview:
        return None
    owner = owner_of(frame)
    found = owner if isinstance(owner, Exported) else getattr(owner, "keeps", None)
    return found if isinstance(found, Exported) else None


def contents(frames: Sequence[Buffer]) -> list[Buffer]:
    """The frames of a message with bytes in place of tickets, for a peer that cannot open them. Blocks for tickets."""
    return [frame if (found := exported_of(frame)) is None else found.contents() for frame in frames]


# The receiver.


def receive(buffer: Buffer, kind: str, device: str, nbytes: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A new tensor for the result of `export`, on the same device if this process sees it.

    Raises:
        DeviceUnreachable: this process cannot reach the device or the sender's memory.
        MalformedFrame: ``buffer`` is neither a ticket nor ``nbytes`` bytes.
    """
    backend = backend_for(kind)
    if backend is None:
        raise DeviceUnreachable(f"a tensor on {device} ({kind}) came, a kind of device that rlmesh does not support")
    view = memoryview(buffer)
    if view.nbytes == nbytes:
        return backend.from_host(buffer, device, dtype, shape)
    number, handle = _parse(view, nbytes)
    own = _exported.get(number)
    if own is not None:
        return own.backend.again(own.snapshot, dtype, shape)
    copy = backend.open(handle, dtype, shape)
    value = copy.value
    _closer.put(copy, view)
    return value


def _parse(view: memoryview, nbytes: int) -> tuple[int, Handle]:
    try:
        fields: dict[str, Any] = json.loads(bytes(view)) if view.nbytes == TICKET_BYTES else {}
        memory, ready = bytes.fromhex(fields["memory"]), bytes.fromhex(fields["ready"])
        handle = Handle(str(fields["device"]), memory, int(fields["offset"]), int(fields["nbytes"]), ready)
        number = int(fields["number"])
    except (ValueError, KeyError, TypeError):
        raise MalformedFrame(f"{view.nbytes} bytes came for a tensor of {nbytes}, and no ticket") from None
    if handle.nbytes != nbytes or handle.offset < 0:
        raise MalformedFrame(f"a ticket for {handle.nbytes} bytes came for a tensor of {nbytes}")
    return number, handle


class Closer:
    """Closes the memory of other processes once it has been copied, then drops the tickets.

    Runs on its own thread, since it waits for the device; the thread ends when there is nothing to close.
    """

    def __init__(self, start: Callable[[Callable[[], None]], object]) -> None:
        self._start = start
        self._work: deque[tuple[Copy, object]] = deque()
        self._changed = threading.Condition()
        self._runs = False

    def put(self, copy: Copy, ticket: object) -> None:
        with self._changed:
            self._work.append((copy, ticket))
            self._changed.notify()
            if self._runs:
                return
            self._runs = True
        self._start(self.run)

    def run(self) -> None:
        while (work := self._next()) is not None:
            copy, ticket = work
            work = None
            try:
                copy.wait()
            except Exception:
                logger.exception("a tensor could not be copied from another process's memory")
            try:
                copy.close()
            except Exception:
                # The sender must not free memory that may be open here, so the reference stays until this process ends.
                logger.exception("memory of another process could not be closed; its owner keeps it")
                _never_closed.append(ticket)
            del copy, ticket  # which releases the slot

    def _next(self) -> tuple[Copy, object] | None:
        with self._changed:
            if not self._work:
                self._changed.wait(_IDLE_S)
            if not self._work:
                self._runs = False
                return None
            return self._work.popleft()


_never_closed: list[object] = []


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="rlmesh-device", daemon=True).start()


_closer = Closer(_start_thread)
