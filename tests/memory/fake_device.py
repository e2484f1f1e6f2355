"""A device without a device: its memory is files, its tensors are torch's ``meta`` tensors with their bytes beside.

Like a real one it makes copies later, when `FakeCopy.wait` is called; whoever reads memory that was freed gets an
error then, and whoever frees memory that somebody has open is told by `FakeBackend.faults`.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlmesh.errors import DeviceUnreachable
from rlmesh.memory import device
from rlmesh.memory.device_backend import Handle, NotShareable
from rlmesh.memory.native import Buffer

KIND = "meta"
DYING_S = 1.0
"""The kernel closes the files of a dying process one after the other."""


def on_device(values: torch.Tensor) -> torch.Tensor:
    """A tensor on the fake device."""
    return _made(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), values.dtype, tuple(values.shape))


def _made(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    tensor.data_of_test = data  # type: ignore[attr-defined]
    return tensor


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    data: bytes = tensor.data_of_test  # type: ignore[attr-defined]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


@dataclass(eq=False)
class Snapshot:
    path: Path
    data: bytes


class FakeCopy:
    def __init__(self, backend: FakeBackend, path: Path, value: torch.Tensor, nbytes: int) -> None:
        self.value, self._backend, self._path, self._nbytes = value, backend, path, nbytes
        self._file = path.open("rb")
        fcntl.flock(self._file, fcntl.LOCK_SH)  # which the kernel takes back from a process that dies

    def wait(self) -> None:
        if not self._path.exists():
            self._backend.faults.append(f"{self._path.name} was freed before it was copied")
        self.value.data_of_test = self._file.read()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._file.close()


class FakeBackend:
    """Args:
    folder: the device's memory.
    names: devices that this process sees; the first is the current one.
    """

    def __init__(self, folder: Path, *names: str, shareable: bool = True) -> None:
        self._folder, self.names, self._shareable = folder, names or ("FAKE-0",), shareable
        self.faults: list[str] = []

    def allocated(self) -> list[str]:
        """Snapshots that senders have not freed."""
        return sorted(path.name for path in self._folder.iterdir())

    def opened(self) -> list[str]:
        """Those of them that receivers have open."""
        return sorted(path.name for path in self._folder.iterdir() if self._is_open(path))

    @staticmethod
    def _is_open(path: Path) -> bool:
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass  # Its sender frees it at this moment.
        return False

    def device_of(self, tensor: torch.Tensor) -> str:
        return self.names[0]

    def snapshot(self, tensor: torch.Tensor) -> Snapshot:
        data: bytes = tensor.data_of_test  # type: ignore[attr-defined]
        path = self._folder / os.urandom(6).hex()
        path.write_bytes(data)
        snapshot = Snapshot(path, data)
        weakref.finalize(snapshot, self._free, path)
        return snapshot

    def _free(self, path: Path) -> None:
        deadline = time.monotonic() + DYING_S
        while self._is_open(path) and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._is_open(path):
            self.faults.append(f"{path.name} was freed while somebody had it open")
        path.unlink()

    def handle(self, snapshot: Snapshot) -> Handle:
        if not self._shareable:
            raise NotShareable("this memory cannot be opened by others")
        return Handle(self.names[0], str(snapshot.path).encode(), 0, len(snapshot.data), b"ready")

    def open(self, handle: Handle, dtype: torch.dtype, shape: tuple[int, ...]) -> FakeCopy:
        if handle.device not in self.names:
            raise DeviceUnreachable(f"the tensor lies on {handle.device}, which this process cannot see")
        return FakeCopy(self, Path(os.fsdecode(handle.memory)), _made(b"", dtype, shape), handle.nbytes)

    def again(self, snapshot: Snapshot, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return _made(snapshot.data, dtype, shape)

    def to_host(self, source: Any) -> Buffer:
        return bytearray(source.data if isinstance(source, Snapshot) else source.data_of_test)

    def from_host(self, buffer: Buffer, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return _made(bytes(buffer), dtype, shape)


def install(folder: Path, *names: str, shareable: bool = True) -> FakeBackend:
    backend = FakeBackend(folder, *names, shareable=shareable)
    device.register(KIND, backend)
    return backend
