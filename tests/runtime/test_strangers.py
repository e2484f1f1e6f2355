"""No code from strangers: what does not come from a holder of the job's key is dropped before it is decoded."""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from rlmesh.errors import AuthenticationFailed, UsageError
from rlmesh.runtime.connections.handshake import Strangers
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.transport import half_open
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY
from tests.runtime.strangers import SCHEMES, Recorder, address_of, connect, say

OTHER_KEY = b"another key of the right length!"


class Member:
    def __init__(self) -> None:
        self.calls = 0

    @rpc
    def count(self) -> int:
        self.calls += 1
        return self.calls

    @rpc
    async def ping(self) -> float:
        return time.monotonic()


class Job:
    """One member that listens, and a caller that asks it all the time."""

    def __init__(self, stack: ExitStack, scheme: str, key: bytes, name: str = "A:0") -> None:
        address = stack.enter_context(address_of(scheme))
        self.member = Member()
        self.runtime = stack.enter_context(Runtime.start(name=name, key=key, bind=address))
        self.runtime.serve(name, self.member)
        self.endpoint = self.runtime.endpoint or ""
        self.name, self.key = name, key

    def call(self, endpoint: str | None = None, timeout_s: float = HANG_S) -> int:
        with Runtime.start(name="caller", key=self.key, bind=False) as caller:
            handle = caller.peer(self.name, endpoint or self.endpoint).options(timeout_s=timeout_s)
            return handle.call(Member.count).result()


class Pings:
    """A caller that asks without a pause; ``worst_s`` is the longest answer."""

    def __init__(self, job: Job) -> None:
        self.worst_s, self.answers = 0.0, 0
        self._stop = threading.Event()
        self._job = job
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def __enter__(self) -> Pings:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            with Runtime.start(name="pings", key=self._job.key, bind=False) as caller:
                handle = caller.peer(self._job.name, self._job.endpoint).options(timeout_s=10)
                while not self._stop.wait(0.002):
                    began = time.monotonic()
                    handle.call(Member.ping).result()
                    self.worst_s = max(self.worst_s, time.monotonic() - began)
                    self.answers += 1
        except BaseException as error:
            self.error = error

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(HANG_S)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def rejected(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The peers that were named, one per line of the log."""
    start = f"{name} rejected "
    return [text.removeprefix(start).partition(" (")[0] for text in caplog.messages if text.startswith(start)]


@pytest.mark.case("O7")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_code_of_strangers_runs(
    scheme: str,
    stack: ExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    until: Callable[..., None],
    own_time: OwnTime,
) -> None:
    job = Job(stack, scheme, KEY)
    other = Job(stack, scheme, OTHER_KEY)
    counts = job.runtime.strangers.counts
    marker = tmp_path / "pwned"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {marker}",)

    with Pings(job) as pings:
        # It is connected before one of those that record takes the listener's path.
        until(lambda: pings.answers > 0 or pings.error is not None)
        say(job.endpoint, pickle.dumps(Evil()))
        say(job.endpoint, os.urandom(10_000_000))
        until(lambda: counts["no greeting"] == 2)

        # What a member of another job said to its peer, and what one of this job said to this very member.
        for recorded_from in (other, job):
            recorder = Recorder(recorded_from.endpoint)
            calls_before = recorded_from.call(recorder.endpoint)
            recorder.close()
            rejections = job.runtime.strangers.total
            say(job.endpoint, bytes(recorder.said))
            until(lambda before=rejections: job.runtime.strangers.total == before + 1)
            assert recorded_from.member.calls == calls_before
        assert job.member.calls == 1

        silent = [stack.enter_context(connect(job.endpoint)) for _ in range(200)]
        began = time.monotonic()
        assert job.call() == 2
        assert own_time.since(began) < 2, "a member could not connect among strangers"
        until(lambda: counts["half-open"] >= 200 - half_open.SOFT_LIMIT, timeout_s=8)
        assert len(select.select(silent, [], [], 0)[0]) >= 200 - half_open.SOFT_LIMIT, "those were hung up"
        until(lambda: pings.answers > 10 or pings.error is not None)
    assert pings.error is None, pings.error
    assert own_time.of(pings.worst_s) < 1
    assert not marker.exists()
    peers = rejected(caplog, "A:0")
    assert 1 <= len(peers) == len(set(peers)) <= 2, "one line per peer and minute"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_key_is_told_at_the_caller_at_once(scheme: str, stack: ExitStack) -> None:
    job = Job(stack, scheme, KEY)
    with Runtime.start(name="imposter", key=OTHER_KEY, bind=False) as imposter:
        future = imposter.peer("A:0", job.endpoint).options(timeout_s=10).call("count")
        with pytest.raises(AuthenticationFailed, match=r"A:0\.count\(\) was not sent: .*does not hold the key"):
            future.result()
    assert job.member.calls == 0


def test_a_listener_without_the_key_learns_nothing(tmp_path: Path) -> None:
    """Somebody sits at a job's old address: the caller says its hello, and no more."""
    with socket.socket(socket.AF_UNIX) as listener, Runtime.start(name="caller", key=KEY, bind=False) as caller:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        future = caller.peer("A:0", f"unix://{tmp_path}/s").options(timeout_s=10).call("store", "a secret")
        with listener.accept()[0] as accepted:
            accepted.settimeout(5)
            said = accepted.recv(65536)
            accepted.sendall(said)  # The best that it can do: a reflection.
            with pytest.raises(Exception, match="was not sent"):
                future.result()
            assert accepted.recv(65536) == b""
        assert b"secret" not in said and b"store" not in said


def test_one_line_is_logged_per_peer_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    strangers = Strangers("A:0", lambda: now)
    for number in range(100):
        now = number * 0.1
        strangers.note("10.0.0.1", "no greeting", "bytes")
        strangers.note("10.0.0.2", "wrong key", "x")
    assert len(caplog.messages) == 2
    now = 61.0
    strangers.note("10.0.0.1", "no greeting", "bytes")
    assert "99 times" in caplog.messages[2] and "101 no greeting, 100 wrong key" in caplog.messages[2]
    for number in range(5000):
        strangers.note(f"10.1.{number // 250}.{number % 250}", "half-open", "x")
    assert len(caplog.messages) < 300, "a flood of peers shares one line"
    assert strangers.counts == {"no greeting": 101, "wrong key": 100, "half-open": 5000}


def test_a_socket_in_a_public_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for scheme in ("unix", "ipc"):
        with pytest.raises(UsageError, match=r"mode 0755.*chmod 700"):
            Runtime.start(name="A:0", key=KEY, bind=f"{scheme}://{tmp_path}/a")


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 33, "text"])
def test_what_is_no_key_is_refused(key: bytes) -> None:
    with pytest.raises(UsageError, match=r"32 random bytes.*rlmesh keygen"):
        Runtime.start(name="A:0", key=key, bind=False)


def test_the_default_address_is_on_this_machine_only() -> None:
    with Runtime.start(name="A:0", key=KEY) as runtime:
        assert (runtime.endpoint or "").startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_zeromq_without_encryption_is_refused_in_every_version(
    scheme: str, stack: ExitStack, until: Callable[..., None]
) -> None:
    """A peer of protocol 1 knows no mechanisms, one of protocol 3 names another: neither gets a message across."""
    job = Job(stack, scheme, KEY)
    say(job.endpoint, b"\x01\x00" + b"\x06\x00hello")
    context = stack.enter_context(zmq.Context())
    dealer = stack.enter_context(context.socket(zmq.DEALER))
    dealer.linger = 0
    dealer.connect(job.endpoint)
    dealer.send(b"hello")
    until(lambda: job.runtime.strangers.counts["no greeting"] >= 2)
    assert job.call() == 1
    assert set(job.runtime.strangers.counts) <= {"no greeting", "half-open"}
