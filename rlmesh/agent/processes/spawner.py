"""Starting workers: forked from a zygote, or started as a new program.

=====================================================================  =============================
environment differs in what the interpreter reads at its start         exec
environment differs in what libraries read when they are imported      fork of the bare zygote
the role needs nothing of the preload list (`needs_preload`)            fork of the bare zygote
else                                                                   fork of the preloaded zygote
=====================================================================  =============================

If a zygote cannot fork, the row above it is used, in the end exec: always right, only slower.
Workers get ``OMP_NUM_THREADS=1`` unless the job's or the submitter's environment sets it, as with torchrun.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlmesh.agent.boot import ZygoteStart
from rlmesh.agent.processes.process import memory_input
from rlmesh.agent.processes.process_table import Child, ProcessTable
from rlmesh.agent.processes.start_claim import make_claim, remove_claim
from rlmesh.agent.processes.zygote import ForkRefused, pack
from rlmesh.agent.protocol import AgentConfig, WorkerSpec
from rlmesh.errors import LaunchError
from rlmesh.job.entry_points.entry import EntryPoint
from rlmesh.runtime.process import clock

__all__ = ["SpawnedMember", "Spawner", "import_time_changes"]

logger = logging.getLogger(__name__)

READY_WAIT_S = 20.0
PRELOAD_WAIT_S = 90.0
"""After this many seconds the worker is forked from the bare zygote and imports for itself. Masters wait longer."""
FORK_WAIT_S = 20.0

Way = Literal["preloaded", "bare", "exec"]

AT_START = ("GLIBC_TUNABLES", "LANG", "LANGUAGE", "LC_", "LD_", "MALLOC_", "PYTHON_", "PYTHONHASHSEED", "PYTHONHOME",
            "PYTHONMALLOC", "PYTHONPATH", "PYTHONUTF8", "PYTHONWARNINGS")  # fmt: skip
"""Variables that the loader and the interpreter read when a program starts. A trailing ``_`` marks a prefix."""

AT_IMPORT = (
    "ACCELERATE_", "ARROW_", "ATEN_", "BLIS_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GOMP_", "GOTO_", "HF_", "HIP_",
    "HOME", "HUGGINGFACE_", "JE_", "KMP_", "MKL_", "NUMBA_", "NUMEXPR_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_",
    "PYTORCH_", "TOKENIZERS_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRANSFORMERS_", "TRITON_", "USE_", "XDG_",
)  # fmt: skip
"""Variables that libraries of the preload list read when they are imported."""

LATER = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TORCH_NCCL_")
"""Exceptions: variables that are read when a device or a process group is opened, which zygotes never do."""


@dataclass(frozen=True, slots=True)
class SpawnedMember:
    """A member's process, how it was started, and how long that took."""

    child: Child
    way: Way
    took_s: float


def import_time_changes(base: Mapping[str, str], wanted: Mapping[str, str], patterns: Iterable[str]) -> set[str]:
    """Variables that match one of ``patterns`` and whose value in ``wanted`` differs from ``base``."""
    return {
        name
        for name, value in wanted.items()
        if base.get(name) != value and _matches(name, patterns) and not _matches(name, LATER)
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name.startswith(text) if text.endswith("_") else name == text for text in patterns)


class _Zygote:
    """The agent's end of one zygote."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name = name
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._sock = sock
        self._turn = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._connect(), name=f"zygote-{name}")

    async def _connect(self) -> None:
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
            ready = await self._read()
        except (OSError, EOFError) as error:
            ready = {"refuses": f"it ended before it was ready ({type(error).__name__})"}
        for item, why in (ready.get("failed") or {}).items():
            logger.warning("the %s zygote could not import %s: %s", self.name, item, why)
        if ready.get("refuses"):
            logger.warning("the %s zygote cannot fork: %s", self.name, ready["refuses"])
        else:
            logger.info("the %s zygote (pid %d) is ready after %.2f s", self.name, ready["pid"], ready["import_s"])
        if not self.ready.done():
            self.ready.set_result(ready)

    async def _read(self) -> dict[str, Any]:
        assert self._reader is not None
        (size,) = struct.unpack(">I", await self._reader.readexactly(4))
        answer: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        return answer

    async def wait_ready(self, wait_s: float) -> None:
        """Wait until the zygote can fork.

        Raises:
            ForkRefused: it cannot fork, or not within the time.
        """
        try:
            async with clock.timeout(wait_s):
                ready = await asyncio.shield(self.ready)
        except TimeoutError:
            raise ForkRefused(f"it was not ready within {wait_s:g} s") from None
        if ready.get("refuses"):
            raise ForkRefused(ready["refuses"])

    async def fork(self, payload: bytes) -> int:
        """Fork a worker and return its process number.

        Raises:
            ForkRefused: the zygote did not fork, or did not answer. It may have forked all the same then.
        """
        async with self._turn:
            if self._writer is None or self._writer.is_closing():
                raise ForkRefused("it has ended")
            try:
                self._writer.write(pack(payload))
                async with clock.timeout(FORK_WAIT_S):
                    answer = await self._read()
            except (OSError, EOFError, TimeoutError) as error:
                self._writer.close()  # a late answer would be taken for the answer to another request
                raise ForkRefused(f"it did not answer ({type(error).__name__})") from None
        if "pid" not in answer:
            raise ForkRefused(answer["refused"])
        pid: int = answer["pid"]
        return pid

    async def close(self) -> None:
        """Close the socket, which ends the zygote."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()
        else:
            self._sock.close()
        self.ready.cancel()


class Spawner:
    """Starts the members of one node."""

    def __init__(
        self, config: AgentConfig, table: ProcessTable, env: Mapping[str, str], start: ZygoteStart | None
    ) -> None:
        """``start`` None: every worker is started by exec."""
        self._config = config
        self._table = table
        self._env = dict(env)
        self._bare: _Zygote | None = None
        self._preloaded: _Zygote | None = None
        self._needs: dict[EntryPoint, bool] = {}
        self._unforkable: set[str] = set()
        self.service: set[Child] = set()
        """The zygotes' processes."""
        self._forks = 0
        self._starting = ExitStack()
        if start is not None:
            self.service.add(table.adopt("zygote", start.pid))
            self._starting.enter_context(table.fork_in_flight())  # the preloaded zygote is forked meanwhile
            self._bare = _Zygote("bare", start.bare)
            self._bare.ready.add_done_callback(self._watch_preloaded)
            if start.preload is not None:
                self._preloaded = _Zygote("preloaded", start.preload)

    def _watch_preloaded(self, ready: asyncio.Future[dict[str, Any]]) -> None:
        pid = 0 if ready.cancelled() else ready.result().get("preload_pid", 0)
        if pid:
            try:
                self.service.add(self._table.adopt("preload", pid))
            except ProcessLookupError:
                logger.warning("the preloaded zygote (pid %d) is gone already", pid)
        self._starting.close()

    def failed_early(self, name: str) -> None:
        """Start the member's next process without a zygote: the last one failed soon after its fork, and may have
        inherited the cause, such as a limit of memory."""
        self._unforkable.add(name)

    async def start_member(self, spec: WorkerSpec) -> SpawnedMember:
        """Start a member's process in the fastest way that works.

        Raises:
            LaunchError: exec failed too.
        """
        began = time.monotonic()
        name = f"{spec.role}:{spec.rank}"
        for zygote, wait_s in await self._candidates(spec):
            try:
                await zygote.wait_ready(wait_s)
                with self._table.fork_in_flight():
                    child = await self._fork(zygote, spec)
            except ForkRefused as refused:
                logger.warning("%s is not forked from the %s zygote: %s", name, zygote.name, refused)
                continue
            way: Way = "preloaded" if zygote is self._preloaded else "bare"
            return SpawnedMember(child, way, time.monotonic() - began)
        return SpawnedMember(self._exec(name, spec), "exec", time.monotonic() - began)

    async def _fork(self, zygote: _Zygote, spec: WorkerSpec) -> Child:
        """Have a zygote fork a member.

        Raises:
            ForkRefused: the member does not run, and this request of the zygote starts it no more.
            LaunchError: whether it runs cannot be known.
        """
        name = spec.name
        self._forks += 1
        claim = f"{self._config.socket_dir}/start-{self._forks}"
        try:
            pid = await zygote.fork(pickle.dumps(replace(spec, claim=claim)))
        except ForkRefused as refused:
            try:
                pid = make_claim(claim)
            except OSError as error:
                raise LaunchError(
                    f"{name}: it is not known whether the {zygote.name} zygote forked it ({refused}), since {claim} "
                    f"cannot be made: {error}"
                ) from None
            if pid == os.getpid():
                raise
            logger.warning("%s was forked by the %s zygote as pid %d although %s", name, zygote.name, pid, refused)
        child = self._adopt(name, pid)
        child.ended.add_done_callback(lambda _: remove_claim(claim))
        return child

    async def _candidates(self, spec: WorkerSpec) -> list[tuple[_Zygote, float]]:
        if f"{spec.role}:{spec.rank}" in self._unforkable:
            logger.info("%s:%d starts by exec: its last process failed soon after its fork", spec.role, spec.rank)
            return []
        if self._bare is None or (changed := import_time_changes(self._env, spec.env, AT_START)):
            if self._bare is not None:
                logger.info("%s:%d starts by exec: %s differ", spec.role, spec.rank, ", ".join(sorted(changed)))
            return []
        bare = (self._bare, READY_WAIT_S)
        if self._preloaded is None:
            return [bare]
        if changed := import_time_changes(self._env, spec.env, AT_IMPORT):
            logger.info("%s:%d imports for itself: %s differ", spec.role, spec.rank, ", ".join(sorted(changed)))
            return [bare]
        from rlmesh.job.entry_points.preload import needs_preload

        for entry in {member.entry for member in spec.members} - set(self._needs):
            self._needs[entry] = await asyncio.to_thread(
                needs_preload, entry, spec.main_path, spec.import_roots, self._config.preload
            )
        needed = any(self._needs[member.entry] for member in spec.members)
        return [(self._preloaded, PRELOAD_WAIT_S), bare] if needed else [bare]

    def _adopt(self, name: str, pid: int) -> Child:
        try:
            return self._table.adopt(name, pid)
        except ProcessLookupError:
            raise LaunchError(f"{name} (pid {pid}) is not a child of the agent although it was just forked") from None

    def _exec(self, name: str, spec: WorkerSpec) -> Child:
        data = memory_input(pickle.dumps(spec))
        python = [sys.executable, *self._config.python_flags, "-P", "-u"]
        argv = [*python, "-m", "rlmesh.agent.worker.worker", str(os.getpid())]
        try:
            return self._table.start(name, argv, {**self._env, **spec.env}, log_path=spec.log_path, inherit={0: data})
        finally:
            os.close(data)

    async def close(self) -> None:
        """End the zygotes; members stay."""
        for zygote in (self._preloaded, self._bare):
            if zygote is not None:
                await zygote.close()
