"""How a client finds a runner."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from rlmesh.envs import ExternalEnvClient
from rlmesh.envs.external import client as client_module
from rlmesh.errors import CallTimeout, PeerLost

from ...own_time import HANG_S


class FakeRunner:
    """Answers a call by a count or an error, or not at all."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def options(self, **_: Any) -> FakeRunner:
        return self

    def call(self, method: str) -> Any:
        future: Future[int] = Future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


def test_runners_that_do_not_answer_do_not_keep_clients_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 0.01)
    client = object.__new__(ExternalEnvClient)
    ends = time.monotonic() + HANG_S
    runners: Any = [FakeRunner(PeerLost("away")), FakeRunner(3), FakeRunner(None), FakeRunner(2)]
    client._runners = runners
    assert client._free_runner(ends) == 3
    runners = [FakeRunner(PeerLost("away")), FakeRunner(PeerLost("away"))]
    client._runners = runners
    with pytest.raises(PeerLost, match="away"):
        client._free_runner(ends)


def test_a_runner_that_stands_still_does_not_hold_a_client_for_ever() -> None:
    class Silent:
        """A stream without items, as long as it is open."""

        def __init__(self) -> None:
            self.closed = threading.Event()
            self.close = self.closed.set

        def __next__(self) -> Any:
            assert self.closed.wait(HANG_S)
            raise StopIteration

    client = object.__new__(ExternalEnvClient)
    client._stream, client.timeout_s = Silent(), 1.0
    with pytest.raises(CallTimeout, match="runner 0 did not let the client in"):
        client._wait_for_the_first_item(0, 0.0)
