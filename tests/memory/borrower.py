"""A process that borrows: ``python -m tests.memory.borrower FD JOB OWNER DIRECTORY``.

It runs one command after the other;
`Borrower` is the test's handle on it. Descriptors, give-backs and errors go through a pair of sockets.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from rlmesh.memory.attach import Attachments, writable
from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.layout import DIRECTORY, Descriptor, SlotRelease, segment_prefix

ANSWER_WITHIN_S = 30.0


def borrowed(attachments: Attachments) -> list[dict[str, Any]]:
    """The slots that a process holds: segment, slot, bytes, views."""
    return [
        {"segment": segment.name, "slot": slot.index, "nbytes": slot.nbytes, "views": slot.parts}
        for segment in attachments._segments.values()
        for slot in segment.slots.values()
    ]


class Commands:
    """What the process can do. Views have names."""

    def __init__(self, job_id: str, owner: str, directory: str) -> None:
        self.exchange = MemoryExchange(job_id, owner, wake=lambda: None, directory=directory)
        self.own = segment_prefix(job_id, owner)
        self.views: dict[str, memoryview] = {}
        self.frames: dict[str, Any] = {}

    def borrow(self, name: str, descriptor: Descriptor, lender: Hashable) -> None:
        self.views[name] = self.exchange.borrow([descriptor], lender)[0]

    def digest(self, name: str) -> str:
        return digest(self.views[name])

    def write(self, name: str, byte: int) -> None:
        view = writable(self.views[name])
        view[:] = bytes([byte]) * len(view)

    def drop(self, name: str) -> None:
        del self.views[name]

    def releases(self) -> dict[Hashable, list[SlotRelease]]:
        return self.exchange.take_releases()

    def pass_on(self, name: str, receiver: Hashable) -> Descriptor | None:
        """Lend a view on; the frame is kept until `sent`. None: it would be copied."""
        frame = self.exchange.capture([self.views[name]])[0]
        descriptor = self.exchange.add_ref(frame, receiver)
        if descriptor is None or descriptor.segment.startswith(self.own):
            return None
        self.frames[name] = frame
        return descriptor

    def put(self, name: str, data: bytes, receiver: Hashable) -> Descriptor | None:
        """A buffer of this process's own pool, lent."""
        self.frames[name] = self.exchange.pool.put([data])[0]
        return self.exchange.add_ref(self.frames[name], receiver)

    def sent(self, name: str) -> None:
        del self.frames[name]

    def receive_give_backs(self, ended: list[SlotRelease], receiver: Hashable) -> None:
        self.exchange.release(ended, receiver)

    def borrowed(self) -> list[dict[str, Any]]:
        return borrowed(self.exchange.attachments)

    def churn(self, descriptors: Sequence[Descriptor], lender: Hashable) -> None:
        """Borrow, write, pass on and drop for ever, until a signal ends it."""
        while True:
            for descriptor in descriptors:
                view = self.exchange.borrow([descriptor], lender)[0]
                self.exchange.capture([view])
                writable(view)[:100] = b"x" * 100
                del view
                self.exchange.take_releases()

    def close_exchange(self) -> None:
        self.exchange.close(0)

    def stop_self(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Borrower:
    """The process as the test sees it: ``borrower.do("digest", "x")``."""

    def __init__(self, job_id: str, owner: str, directory: str = DIRECTORY) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.memory.borrower", str(theirs.fileno()), job_id, owner, directory]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.connection = Connection(ours.detach())

    def start(self, name: str, *args: Any) -> None:
        self.connection.send((name, args))

    def result(self) -> Any:
        if not self.connection.poll(ANSWER_WITHIN_S):
            raise TimeoutError("the borrower gave no answer")
        ok, value = self.connection.recv()
        if not ok:
            raise value
        return value

    def do(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_WITHIN_S)

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(ANSWER_WITHIN_S)
        finally:
            self.kill()


@contextmanager
def borrower(job_id: str, owner: str, directory: str = DIRECTORY) -> Iterator[Borrower]:
    started = Borrower(job_id, owner, directory)
    try:
        yield started
    finally:
        started.close()


def main() -> None:
    fd, job_id, owner, directory = sys.argv[1:]
    connection = Connection(int(fd))
    commands = Commands(job_id, owner, directory)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            break
        try:
            answer = (True, getattr(commands, name)(*args))
        except Exception as error:
            answer = (False, error)
        connection.send(answer)
    commands.exchange.close(0)


if __name__ == "__main__":
    main()
