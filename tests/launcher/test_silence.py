"""A node whose head is gone: when it looks, and that it never waits for a call that nobody will answer."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress

import pytest

from rlmesh.errors import LaunchError
from rlmesh.rendezvous.client import NodeOptions, join_and_serve
from rlmesh.rendezvous.liveness import ServerLiveness
from rlmesh.rendezvous.server import RendezvousOptions, RendezvousServer
from rlmesh.runtime.connections.security import make_key
from tests.own_time import HANG_S, OwnTime


def silence() -> ServerLiveness:
    return ServerLiveness(100.0, quiet_s=4.0, check_s=1.0, lost_s=20.0)


def test_no_look_as_long_as_answers_come_in_time() -> None:
    quiet = silence()
    assert not quiet.check_due(103.9)
    quiet.answered(103.9)
    assert not quiet.check_due(107.0)
    assert not quiet.is_lost(107.0)


def test_a_late_answer_is_a_reason_to_look_now_and_then() -> None:
    quiet = silence()
    assert [at for at in (103.0, 104.5, 105.0, 105.6, 106.0) if quiet.check_due(at)] == [104.5, 105.6]


def test_a_failed_call_is_a_reason_to_look_at_once_and_until_it_answers() -> None:
    quiet = silence()
    quiet.failed()
    assert [at for at in (100.1, 100.5, 101.2) if quiet.check_due(at)] == [100.1, 101.2]
    quiet.answered(101.5)
    assert not quiet.check_due(103.0)


def test_a_silent_head_is_given_up_in_the_end() -> None:
    quiet = silence()
    quiet.failed()
    assert not quiet.is_lost(120.0)
    assert quiet.is_lost(120.1)
    assert quiet.silent_s(120.1) == pytest.approx(20.1)


class Way:
    """A port of its own that leads to the head's. ``die`` is how a process ends under load: its connections are closed
    first, and its port only when a further connection was made."""

    def __init__(self, port: int) -> None:
        self._head = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._dies = threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        while not self._dies.is_set():
            for one in select.select([self._listener, *self._pairs], [], [], 0.02)[0]:
                if one is self._listener:
                    here, there = one.accept()[0], socket.create_connection(("127.0.0.1", self._head))
                    self._pairs.update({here: there, there: here})
                elif one in self._pairs:
                    self._pass(one)
        for one in list(self._pairs):
            one.close()
        self._listener.settimeout(5.0)
        with suppress(TimeoutError):
            self._listener.accept()[0].close()
        self._listener.close()

    def _pass(self, one: socket.socket) -> None:
        try:
            data = one.recv(65536)
            self._pairs[one].sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (one, self._pairs.pop(one)):
                self._pairs.pop(end, None)
                end.close()

    def die(self) -> None:
        self._dies.set()
        self._thread.join(HANG_S)


def test_a_head_whose_port_closes_after_its_connections_is_noticed(own_time: OwnTime) -> None:
    key, told = make_key(), list[BaseException]()
    with RendezvousServer(RendezvousOptions(2, 2, "127.0.0.1", 0, key, "1")) as head:
        way = Way(head.port)

        def live() -> None:
            try:
                join_and_serve(NodeOptions("127.0.0.1", way.port, key, "1", 1))
            except LaunchError as error:
                told.append(error)

        node = threading.Thread(target=live)
        node.start()
        try:
            head.check(head.wait_full(lambda: False))  # The node has its answer, and obeys.
            died = time.monotonic()
        finally:
            way.die()
        node.join(30.0)
        took = own_time.since(died)
    assert "has ended, and the job with it; node 1 ends too" in str(told)
    assert took < 5.0
