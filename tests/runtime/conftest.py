"""A small job in one process: members with runtimes of their own, and a caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlmesh.runtime.connections.address_book import AddressBook
from rlmesh.runtime.transport.base import TRANSPORT_VARIABLE
from rlmesh.testing import InProcessCluster
from rlmesh.testing.in_process import TransportName
from tests.own_time import HANG_S
from tests.settling import settle

KEY = b"0123456789abcdef0123456789abcdef"


class Mesh(InProcessCluster):
    """Serves objects as members of roles, under a key that processes of the test know too."""

    def __init__(self, transport: TransportName = "unix") -> None:
        super().__init__(transport, key=KEY)

    def __enter__(self) -> Mesh:
        super().__enter__()
        return self

    def close(self) -> None:
        for runtime in self.runtimes:
            runtime.close()
        left = list(self.socket_dir.iterdir())
        super().close()
        assert left == [], "a socket file was left"

    def process_address(self) -> str:
        """Where a process of its own may bind."""
        if self.transport == "tcp":
            return "tcp://127.0.0.1:*"
        return f"{'ipc' if self.transport == 'ipc' else 'unix'}://{self.socket_dir}/process"

    def wait_for_books(self, book: AddressBook) -> None:
        """Taking a book is asynchronous."""
        settle(*self.runtimes)
        assert all(runtime.address_book() == book for runtime in self.runtimes)


def _until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    import time

    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.002)


@pytest.fixture
def until() -> Callable[..., None]:
    return _until


@pytest.fixture(params=["unix", "ipc"])
def mesh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """Over each transport of one node, which other runtimes of the test use as well."""
    monkeypatch.setenv(TRANSPORT_VARIABLE, "zmq" if request.param == "ipc" else "unix")
    with Mesh(request.param) as made:
        yield made
