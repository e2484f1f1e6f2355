"""How fast do big buffers go from process to process through shared memory? python benchmarks/memory.py

No runtime: descriptors and give-backs go through socket pairs, so this is what `rlmesh.memory` itself costs, and the
upper bound of what calls can reach. Every number is the median of ``ROUNDS`` rounds in GB/s (10^9 bytes), each round
from the capture of the caller's buffer to the receiver's answer, which has read one byte of it, or all of it.
With --cpu: also GB per second of CPU time of the sending process, for machines on which others work.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any

from rlmesh.memory.attach import writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import Descriptor
from rlmesh.memory.native import address_of

ROUNDS = 15
RECEIVERS = 8
SIZES_MIB = (1, 64, 512)


class Receiver:
    """A process with an exchange; commands and answers go through a pair of sockets."""

    def __init__(self, job_id: str, number: int) -> None:
        ours, theirs = socketpair()
        with theirs:
            command = [sys.executable, __file__, "--receiver", str(theirs.fileno()), job_id, str(number)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.connection = Connection(ours.detach())

    def close(self) -> None:
        self.connection.close()
        self.process.wait(10)


def serve(fd: int, job_id: str, owner: str) -> None:
    """The receiver: takes a buffer and reads from it, gives one, passes one on, or changes one."""
    connection = Connection(fd)
    exchange = MemoryExchange(job_id, f"receiver{owner}", wake=lambda: None)
    kept: dict[int, bytearray] = {}
    while True:
        try:
            what, argument, ended = connection.recv()
        except EOFError:
            break
        exchange.release(ended, "main")
        answer: Any = None
        frame = None
        if what == "give":
            if argument not in kept:
                kept[argument] = bytearray(b"x") * argument
            frame = exchange.capture([kept[argument]])[0]
            answer = exchange.add_ref(frame, "main")
        elif what != "nothing":
            view = exchange.borrow([argument], "main")[0]
            if what == "read all":
                _read(view)
            elif what == "change all":
                changed = writable(view)
                _write(changed)
                del changed
            elif what == "pass on":
                frame = exchange.capture([view])[0]
                answer = exchange.add_ref(frame, "main")
            else:
                answer = view[-1]
            del view
        del frame
        # Answered first: giving back is not on the caller's way.
        connection.send(answer)
        connection.send(exchange.take_releases().get("main", []))
    exchange.close(0)


def _read(view: memoryview) -> None:
    ctypes.CDLL(None).memchr(_address(view), 0, ctypes.c_size_t(view.nbytes))


def _write(view: memoryview) -> None:
    ctypes.memset(_address(view), 1, view.nbytes)


def _address(view: memoryview) -> ctypes.c_void_p:
    return ctypes.c_void_p(address_of(view))


class Bench:
    def __init__(self, job_id: str, receivers: int) -> None:
        self.exchange = MemoryExchange(job_id, "main", wake=lambda: None)
        self.receivers = [Receiver(job_id, n) for n in range(receivers)]
        self.ended: dict[int, list[Any]] = {n: [] for n in range(receivers)}
        self._last = (0.0, 0.0)

    def send(self, what: str, source: bytearray) -> list[Any]:
        """To all receivers; their answers."""
        frame = self.exchange.capture([source])[0]
        for n, receiver in enumerate(self.receivers):
            receiver.connection.send((what, self.exchange.add_ref(frame, n), self.ended[n]))
        del frame
        return self._answers()

    def ask(self, what: str, argument: Any) -> list[Any]:
        for n, receiver in enumerate(self.receivers):
            receiver.connection.send((what, argument, self.ended[n]))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [receiver.connection.recv() for receiver in self.receivers]
        views = [
            self.exchange.borrow([answer], n)[0] if isinstance(answer, Descriptor) else answer
            for n, answer in enumerate(answers)
        ]
        self._last = time.perf_counter(), time.process_time()
        return [view[-1] if isinstance(view, memoryview) else view for view in views]

    def settle(self) -> None:
        """Give-backs of both sides; after the clock was stopped, as a runtime does it after the answer."""
        ours = self.exchange.take_releases()
        for n, receiver in enumerate(self.receivers):
            self.exchange.release(receiver.connection.recv(), n)
            self.ended[n] = ours.get(n, [])

    def median(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds of time and of this process's CPU time."""
        seconds, cpu = [], []
        for _ in range(ROUNDS + 2):
            start, start_cpu = time.perf_counter(), time.process_time()
            work()
            seconds.append(self._last[0] - start)
            cpu.append(self._last[1] - start_cpu)
            self.settle()
        return statistics.median(seconds[2:]), statistics.median(cpu[2:])

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.exchange.close(0)


def measure(bench: Bench, nbytes: int, show: Callable[[str, int, tuple[float, float]], None]) -> None:
    size, source = f"{nbytes >> 20} MiB", bytearray(b"x") * nbytes
    show(f"{size} to another process", nbytes, bench.median(lambda: bench.send("read one", source)))
    show(f"{size} back", nbytes, bench.median(lambda: bench.ask("give", nbytes)))
    show(f"{size} there, passed back", 2 * nbytes, bench.median(lambda: bench.send("pass on", source)))
    show(f"{size} there, all read", nbytes, bench.median(lambda: bench.send("read all", source)))
    show(f"{size} there, all changed", nbytes, bench.median(lambda: bench.send("change all", source)))
    show(f"{size} memcpy, for comparison", nbytes, _memcpy(source))
    assert bench.exchange.exhausted == 0


def _memcpy(source: bytearray) -> tuple[float, float]:
    target = memoryview(bytearray(len(source)))
    seconds, cpu = [], []
    for _ in range(ROUNDS):
        start, start_cpu = time.perf_counter(), time.process_time()
        target[:] = source
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    return statistics.median(seconds), statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--receiver", nargs=3, metavar=("FD", "JOB", "NUMBER"))
    options = parser.parse_args()
    if options.receiver:
        fd, job_id, number = options.receiver
        serve(int(fd), job_id, number)
        return

    def show(name: str, nbytes: int, medians: tuple[float, float]) -> None:
        rates = [nbytes / seconds / 1e9 for seconds in medians[: 2 if options.cpu else 1]]
        print(f"{name:<34}" + "".join(f"{rate:10.2f}" for rate in rates), flush=True)

    print(f"{'':<34}" + f"{'GB/s':>10}" + ("      per CPU s" if options.cpu else ""))
    with closing(Bench(f"bench{os.getpid()}", 1)) as one:
        for mib in SIZES_MIB:
            measure(one, mib << 20, show)
    with closing(Bench(f"bench{os.getpid()}", RECEIVERS)) as many:
        source = bytearray(b"x") * (64 << 20)
        seconds = many.median(lambda: many.send("read one", source))
        show(f"64 MiB to {RECEIVERS} processes, in all", RECEIVERS * len(source), seconds)


if __name__ == "__main__":
    main()
