"""Roles that the tests of the agent run in real workers."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from rlmesh import rpc
from rlmesh.job.context import current_worker


@rpc
def module_function(x: int) -> int:
    return x + current_worker().rank


class Echo:
    """Serves; notes what happens to it in a file of the run directory."""

    def setup(self) -> None:
        self.note("setup")
        self.born_in = threading.current_thread()

    def note(self, text: str) -> None:
        with open(current_worker().run_dir / f"{current_worker().name}.notes", "a") as file:
            file.write(text + "\n")

    @rpc
    def echo(self, x: object) -> object:
        return x

    @rpc
    def on_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread() is self.born_in

    @rpc
    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @rpc
    def facts(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "comm": Path("/proc/self/comm").read_text().strip(),
            "random": random.random(),
            "modules": sorted(sys.modules),
            "input": os.readlink("/proc/self/fd/0"),
            "output": os.readlink("/proc/self/fd/1"),
            "config": current_worker().job_info.user_config,
        }

    @rpc
    def daemon(self) -> int:
        """Start a double-forked daemon in a session of its own; returns its number."""
        code = (
            "import os\n"
            "if os.fork(): os._exit(0)\n"
            "os.setsid()\n"
            "pid = os.fork()\n"
            "if pid: print(pid, flush=True); os._exit(0)\n"
            "os.closerange(0, 3); os.execvp('sleep', ['sleep', '1000'])\n"
        )
        out = subprocess.run([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, check=True)
        while Path(f"/proc/{int(out.stdout)}/comm").read_text() != "sleep\n":
            time.sleep(0.001)
        return int(out.stdout)

    @rpc
    def flee(self) -> None:
        """Start a process that lives on as a child of itself, again and again; returns when it does."""
        code = (
            "import os, signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if os.fork(): os._exit(0)\n"
            "print('runs', flush=True); os.closerange(0, 3)\n"
            "while True:\n"
            "    os.setsid() if os.getsid(0) != os.getpid() else None\n"
            "    if os.fork(): os._exit(0)\n"
            "    time.sleep(0.001)\n"
        )
        subprocess.run([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, check=True)

    @rpc
    def large(self, nbytes: int) -> object:
        import numpy as np

        self.kept = np.zeros(nbytes, dtype=np.uint8)
        return self.kept

    @rpc
    def leave(self, code: int) -> None:
        sys.exit(code)

    @rpc
    def say(self, text: str) -> None:
        print(text, end="")

    def teardown(self) -> None:
        self.note("teardown")


class Holder(Echo):
    @rpc
    def hold_in_system_calls(self, seconds: float) -> list[float]:
        """Sleeps and polls without letting go of the interpreter's lock, as a C library may; for how long each took,
        and what ``poll`` gave."""
        self.note("holds the lock")
        libc = ctypes.PyDLL(None, use_errno=True)
        nap = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        began = time.monotonic()
        slept = libc.nanosleep(nap, None)
        middle = time.monotonic()
        polled = libc.poll(None, 0, int(seconds * 1000))
        return [slept, middle - began, polled, time.monotonic() - middle]

    @rpc
    def hold_the_lock(self, seconds: float) -> int:
        """Be in C, with the interpreter's lock, so that no other thread of this process runs Python."""
        libc = ctypes.PyDLL(None)
        self.note("holds the lock")
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            libc.usleep(ctypes.c_uint(500_000))
        return os.getpid()


class SlowSetup(Echo):
    def setup(self) -> None:
        super().setup()
        time.sleep(0.3)
        self.note("setup is over")

    @rpc
    async def notes(self) -> str:
        return (current_worker().run_dir / f"{current_worker().name}.notes").read_text()


class Runner(Echo):
    def run(self) -> None:
        self.note("run")
        current_worker().report(step=1, loss=0.5)


class Looper(Echo):
    """Runs until a step boundary says stop."""

    def run(self) -> None:
        self.note("run")
        while (stop := current_worker().step_boundary()) is None:
            time.sleep(0.01)
        self.note(f"stopped: {stop.reason}")


class Stubborn(Echo):
    """Never looks at a step boundary."""

    def run(self) -> None:
        self.note("run")
        time.sleep(1000)


class DeafToAll(Stubborn):
    def run(self) -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().run()


class OwnError(Exception):
    """Cannot be imported by the master."""


class FailsInInit:
    def __init__(self) -> None:
        raise OwnError("no model")


class FailsInSetup:
    def setup(self) -> None:
        raise ValueError("no data")


class FailsInRun(Echo):
    def run(self) -> None:
        raise KeyError("loss")


class FailsInTeardown(Echo):
    def teardown(self) -> None:
        raise OSError("disk full")


class ExitsInRun(Echo):
    def run(self) -> None:
        raise SystemExit(current_worker().rank)


class Hangs(Echo):
    """Leaves a thread that never ends."""

    def teardown(self) -> None:
        threading.Thread(target=time.sleep, args=(1000,)).start()


def function_entry() -> None:
    current_worker().report(step=7, done=1.0)
