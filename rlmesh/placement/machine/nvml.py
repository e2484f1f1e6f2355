"""The GPUs of this machine, read through NVML. The only module that imports pynvml (package nvidia-ml-py).

NVML is opened for each read and closed again: a process that forks must not hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from rlmesh.placement.machine.gpu_health import DeviceEvent
from rlmesh.placement.machine.masks import GpuFacts, SliceFacts

T = TypeVar("T")
P2P_READ, P2P_OK = 0, 0
"""NVML's numbers; some versions of pynvml have a tuple in place of the first."""


class NvmlFailed(Exception):
    """NVML is missing or does not work; the text says why."""


def library(name: str = "") -> Any:
    """The module with NVML's functions: pynvml, or the one named by ``module:attribute``, for machines without GPUs.

    Raises:
        NvmlFailed: it is not installed.
    """
    module, _, attribute = name.partition(":")
    try:
        if not module:
            import pynvml

            return pynvml
        found = import_module(module)
    except ImportError as error:
        raise NvmlFailed(f"{error}; pip install nvidia-ml-py") from None
    return getattr(found, attribute) if attribute else found


class Nvml:
    """Reads GPUs through ``lib``, a module with pynvml's functions."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Context manager that initialises the library and shuts it down.

        Raises:
            NvmlFailed: it could not be initialised.
        """
        try:
            self._lib.nvmlInit()
        except self._lib.NVMLError as error:
            raise NvmlFailed(f"NVML: {error}") from None
        try:
            yield self._lib
        finally:
            self._lib.nvmlShutdown()

    def read(self) -> tuple[GpuFacts, ...]:
        """Read all GPUs. Unreadable GPUs are left out; readable but broken ones have a ``fault``.

        Raises:
            NvmlFailed: NVML does not work.
        """
        with self.opened() as lib:
            try:
                count = lib.nvmlDeviceGetCount()
            except lib.NVMLError as error:
                raise NvmlFailed(f"NVML: {error}") from None
            handles = [handle for i in range(count) if (handle := self._handle(i)) is not None]
            uuids = {i: _text(uuid) for i, h in enumerate(handles) if (uuid := self._ask(lib.nvmlDeviceGetUUID, h))}
            return tuple(self._gpu(i, handles, uuids) for i in uuids)

    def reached_by(self, uuid: str) -> tuple[str, ...]:
        """The UUIDs of the other GPUs whose memory this GPU can read, as NVML's peer-to-peer status says.

        Raises:
            NvmlFailed: NVML does not work.
        """
        with self.opened() as lib:
            reader = self._ask(lib.nvmlDeviceGetHandleByUUID, uuid)
            if reader is None:
                return ()
            found = []
            for i in range(self._ask(lib.nvmlDeviceGetCount) or 0):
                other = self._handle(i)
                name = _text(self._ask(lib.nvmlDeviceGetUUID, other) or "") if other is not None else ""
                if name and name != uuid and self._ask(lib.nvmlDeviceGetP2PStatus, reader, other, P2P_READ) == P2P_OK:
                    found.append(name)
            return tuple(found)

    def _handle(self, index: int) -> Any:
        return self._ask(self._lib.nvmlDeviceGetHandleByIndex, index)

    def _ask(self, function: Callable[..., T], *args: Any) -> T | None:
        """The answer of NVML; None if unsupported: not every GPU knows everything."""
        try:
            return function(*args)
        except self._lib.NVMLError:
            return None

    def _gpu(self, index: int, handles: list[Any], uuids: dict[int, str]) -> GpuFacts:
        lib, handle = self._lib, handles[index]
        pci = self._ask(lib.nvmlDeviceGetPciInfo, handle)
        memory = self._ask(lib.nvmlDeviceGetMemoryInfo, handle)
        mig = self._ask(lib.nvmlDeviceGetMigMode, handle)
        divided = mig is not None and mig[0] == lib.NVML_DEVICE_MIG_ENABLE
        ecc = self._ask(
            lib.nvmlDeviceGetTotalEccErrors, handle, lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC
        )
        links = ((uuids[i], self._links(handle, handles[i])) for i in uuids if i != index)
        return GpuFacts(
            uuid=uuids[index],
            bus_id=_text(pci.busId).upper() if pci is not None else "",
            model=_text(self._ask(lib.nvmlDeviceGetName, handle) or ""),
            memory_bytes=int(memory.total) if memory is not None else 0,
            minor=self._ask(lib.nvmlDeviceGetMinorNumber, handle),
            links=tuple((uuid, count) for uuid, count in links if count),
            mig=divided,
            slices=self._slices(handle) if divided else (),
            fault=self.fault(handle),
            uncorrected=int(ecc or 0),
        )

    def watch(self, uuids: Iterable[str], wait_s: float, closing: Callable[[], bool]) -> Iterator[DeviceEvent | None]:
        """Events of GPUs as NVML sends them; None after each ``wait_s`` without an event. Blocks; run it on a thread.

        Ends when ``closing()`` is true. GPUs that cannot send events are left out.

        Raises:
            NvmlFailed: NVML does not work.
        """
        with self.opened() as lib:
            events = lib.nvmlEventSetCreate()
            try:
                wanted = lib.nvmlEventTypeXidCriticalError | lib.nvmlEventTypeDoubleBitEccError
                for uuid in uuids:
                    if (handle := self._ask(lib.nvmlDeviceGetHandleByUUID, uuid)) is not None:
                        types = self._ask(lib.nvmlDeviceGetSupportedEventTypes, handle) or 0
                        self._ask(lib.nvmlDeviceRegisterEvents, handle, wanted & types, events)
                while not closing():
                    yield self._next(events, wait_s)
            finally:
                lib.nvmlEventSetFree(events)

    def _next(self, events: Any, wait_s: float) -> DeviceEvent | None:
        lib = self._lib
        try:
            event = lib.nvmlEventSetWait_v2(events, int(wait_s * 1000))
        except lib.NVMLError as error:
            if error.value in (lib.NVML_ERROR_TIMEOUT, lib.NVML_ERROR_GPU_IS_LOST):
                return None  # the next read shows which one is lost
            raise NvmlFailed(f"NVML: {error}") from None
        uuid = self._ask(lib.nvmlDeviceGetUUID, event.device)
        if uuid is None:
            return None
        if event.eventType == lib.nvmlEventTypeXidCriticalError:
            return DeviceEvent(_text(uuid), "xid", int(event.eventData))
        return DeviceEvent(_text(uuid), "fault", text="a memory error that ECC could not correct")

    def _slices(self, handle: Any) -> tuple[SliceFacts, ...]:
        lib = self._lib
        found = []
        for i in range(self._ask(lib.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = self._ask(lib.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
            uuid = self._ask(lib.nvmlDeviceGetUUID, part) if part is not None else None
            if uuid is None:
                continue
            memory = self._ask(lib.nvmlDeviceGetMemoryInfo, part)
            instance = self._ask(lib.nvmlDeviceGetGpuInstanceId, part)
            compute = self._ask(lib.nvmlDeviceGetComputeInstanceId, part)
            size = int(memory.total) if memory is not None else 0
            found.append(SliceFacts(_text(uuid), size, instance or 0, compute or 0))
        return tuple(sorted(found, key=lambda s: (s.gpu_instance, s.compute_instance)))

    def _links(self, one: Any, other: Any) -> int:
        """Number of NVLinks between two GPUs; through a switch, as many as the GPU with fewer has."""
        lib = self._lib
        status = self._ask(lib.nvmlDeviceGetP2PStatus, one, other, lib.NVML_P2P_CAPS_INDEX_NVLINK)
        if status != lib.NVML_P2P_STATUS_OK:
            return 0
        pci = self._ask(lib.nvmlDeviceGetPciInfo, other)
        there = _text(pci.busId).upper() if pci is not None else ""
        ends = [self._ask(lib.nvmlDeviceGetNvLinkRemotePciInfo, one, link) for link in self._active(one)]
        direct = sum(_text(end.busId).upper() == there for end in ends if end is not None)
        return direct or min(len(self._active(one)), len(self._active(other))) or 1

    def _active(self, handle: Any) -> list[int]:
        lib = self._lib
        return [
            link
            for link in range(lib.NVML_NVLINK_MAX_LINKS)
            if self._ask(lib.nvmlDeviceGetNvLinkState, handle, link) == lib.NVML_FEATURE_ENABLED
        ]

    def fault(self, handle: Any) -> str:
        """The reason why a GPU must not be used, as far as NVML knows; empty if it may. NVML must be open."""
        lib = self._lib
        try:
            lib.nvmlDeviceGetMemoryInfo(handle)
        except lib.NVMLError as error:
            if error.value in (lib.NVML_ERROR_GPU_IS_LOST, lib.NVML_ERROR_RESET_REQUIRED):
                return f"NVML: {error}"
        rows = self._ask(lib.nvmlDeviceGetRemappedRows, handle)
        if rows is not None and rows[3]:
            return "a broken row of its memory could not be remapped: the card is to be replaced"
        if self._ask(lib.nvmlDeviceGetComputeMode, handle) == lib.NVML_COMPUTEMODE_PROHIBITED:
            return "its compute mode is PROHIBITED"
        return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
