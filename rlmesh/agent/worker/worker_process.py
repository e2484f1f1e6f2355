"""Changes of a worker to its own process: random generators, C output, memory limits, and its exit."""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import logging
import os
import random
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlmesh.agent.protocol import WorkerSpec

logger = logging.getLogger(__name__)


def flush_c_output_by_line() -> None:
    """Flush the output of C libraries by line: they buffer a file by the page, which SIGKILL would lose."""
    try:
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, ctypes.c_size_t(0))
    except (OSError, ValueError, AttributeError):
        pass


def reseed(spec: WorkerSpec) -> None:
    """Seed the existing generators from job name, role, rank and incarnation: forks would share their state.

    Libraries that are imported later seed themselves.
    """
    who = f"{spec.job_name}/{spec.role}/{spec.rank}/{spec.incarnation}"
    digest = hashlib.sha256(who.encode()).digest()
    random.seed(digest)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(digest[:4], "big"))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(digest[8:16], "big") >> 1)


def bound_exit(code: int, grace_s: float) -> None:
    """Bound the time of the interpreter's exit (exit handlers, threads that are not daemons). If SIGTERM ended the
    member, the process ends in that signal."""

    def give_up() -> None:
        logger.error("the process did not end within %g s after teardown: threads or exit handlers hang", grace_s)
        faulthandler.dump_traceback(2)
        os._exit(code if code >= 0 else 128 - code)

    timer = threading.Timer(grace_s, give_up)
    timer.daemon = True
    try:
        timer.start()
    except (RuntimeError, MemoryError):  # no thread can be started: let the kernel end the process, by SIGALRM
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, grace_s)


def memory_limits(error: BaseException) -> str:
    """A text with the process's memory limits and its peak, if the error is a MemoryError; else empty."""
    if not isinstance(error, MemoryError):
        return ""
    names = {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_DATA": resource.RLIMIT_DATA}
    limits = {name: resource.getrlimit(number)[0] for name, number in names.items()}
    set_ones = [
        f"{name} is {value / 2**20:,.0f} MiB" for name, value in limits.items() if value != resource.RLIM_INFINITY
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"\nout of memory: {', '.join(set_ones) or 'no limit is set on the process'}; its peak was {peak:,.0f} MiB\n"


def print_error(text: str) -> None:
    try:
        sys.stderr.write(text.rstrip() + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # the disk of the log is full, which must not prevent the report to the master


def exit_code(exit: SystemExit) -> int:
    """The exit code as the interpreter would set it: no code is 0; a text is printed and gives 1."""
    if exit.code is None:
        return 0
    if isinstance(exit.code, int):
        return exit.code & 0xFF
    print_error(str(exit.code))
    return 1
