"""A small job in one process: members with runtimes of their own, and a caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmesh.runtime.address import AddressBook, MemberAddress, member_name
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.transport import TRANSPORT_VARIABLE

KEY = b"0123456789abcdef0123456789abcdef"


class Mesh:
    """Serves objects as members of roles and calls them through real sockets."""

    def __init__(self, socket_dir: Path) -> None:
        self.socket_dir = socket_dir
        self.runtimes: list[Runtime] = []
        self.addresses: list[MemberAddress] = []
        self.caller = self.start("caller", bind=False)

    def start(self, name: str, *, bind: bool = True) -> Runtime:
        runtime = Runtime.start(name=name, key=KEY, socket_dir=self.socket_dir, bind=bind)
        self.runtimes.append(runtime)
        return runtime

    def serve(self, role: str, *objects: object) -> RoleGroup[Any]:
        for rank, obj in enumerate(objects):
            runtime = self.start(member_name(role, rank))
            runtime.serve(member_name(role, rank), obj)
            self.addresses.append(MemberAddress(role, rank, 0, runtime.endpoint))
        self.publish()
        return RoleGroup(role, runtime=self.caller)

    def publish(self, *more: MemberAddress) -> None:
        self.addresses += more
        book = AddressBook(len(self.addresses), tuple(self.addresses))
        for runtime in self.runtimes:
            runtime.set_address_book(book)
        self.wait_for_books(book)

    def wait_for_books(self, book: AddressBook) -> None:
        """Taking a book is asynchronous."""
        _until(lambda: all(runtime._calls.book == book for runtime in self.runtimes))

    def close(self) -> None:
        for runtime in self.runtimes:
            runtime.close()


def _until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    import time

    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.002)


@pytest.fixture
def until() -> Callable[..., None]:
    return _until


@pytest.fixture(params=["unix", "zmq"])
def mesh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """Over each transport of one node."""
    import tempfile

    monkeypatch.setenv(TRANSPORT_VARIABLE, request.param)
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        made = Mesh(Path(directory))
        try:
            yield made
        finally:
            made.close()
        assert list(Path(directory).iterdir()) == [], "a socket file was left"
