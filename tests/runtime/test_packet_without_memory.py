"""A packet that a process has no memory to handle is not lost without a word."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest

from rlmesh.errors import PeerLost
from rlmesh.runtime.connections import inbound
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.wire.envelope import unpack
from tests.own_time import OwnTime
from tests.runtime.strangers import address_of

KEY = b"key of thirty-two bytes, for it!"


class Member:
    @rpc
    def plus_one(self, number: int) -> int:
        return number + 1


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_the_caller_learns_that_its_call_got_lost(
    scheme: str, monkeypatch: pytest.MonkeyPatch, own_time: OwnTime
) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(address_of(scheme))
        member = stack.enter_context(Runtime.start(name="A:0", key=KEY, bind=address))
        member.serve("A:0", Member())
        caller = stack.enter_context(Runtime.start(name="caller", key=KEY, bind=False))
        handle = caller.peer("A:0", member.endpoint or "").options(timeout_s=30)
        assert handle.call(Member.plus_one, 1).result() == 2
        failures = [MemoryError()]

        def without_memory(*args: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return unpack(*args, **options)

        monkeypatch.setattr(inbound, "unpack", without_memory)
        began = time.monotonic()
        with pytest.raises(PeerLost):
            handle.call(Member.plus_one, 2).result()
        assert own_time.since(began) < 15
