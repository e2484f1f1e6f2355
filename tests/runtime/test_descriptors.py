"""Strangers that use up a listener's descriptors are thrown out; members still come in."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import pytest

from rlmesh.errors import CallError, UsageError
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.transport.base import TRANSPORT_VARIABLE
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY
from tests.runtime.strangers import address_of, connect

SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.runtime import Runtime

class Member:
    @rpc
    def counts(self): return dict(runtime.strangers.counts)

with Runtime.start(name="A:0", key=bytes.fromhex(sys.argv[1]), bind=sys.argv[2]) as runtime:
    runtime.serve("A:0", Member())
    print(runtime.endpoint, flush=True)
    sys.stdin.read()
"""


# libzmq itself aborts the process when accept() on ipc finds no descriptor (docs/decisions/0010).
@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_a_listener_out_of_descriptors_takes_members_all_the_same(scheme: str) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(address_of(scheme))
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, KEY.hex(), address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(server.wait, 20)
        assert server.stdin is not None and server.stdout is not None
        stack.enter_context(server.stdout)
        stack.enter_context(server.stdin)
        endpoint = server.stdout.readline().strip()
        for _ in range(300):
            stack.enter_context(connect(endpoint))
        began = time.monotonic()
        with Runtime.start(name="caller", key=KEY, bind=False) as caller:
            counts = caller.peer("A:0", endpoint).options(timeout_s=20).call("counts").result()
        print(f"{time.monotonic() - began:.2f} s, {counts}")
        assert counts["half-open"] > 100


def test_zeromq_is_not_asked_for_what_would_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq aborts when it gets no descriptor; whoever listens or calls is told before."""
    monkeypatch.setenv(TRANSPORT_VARIABLE, "zmq")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.TemporaryDirectory(prefix="rlm-") as sockets, Runtime.start(name="c", socket_dir=sockets) as runtime:
        assert runtime.endpoint is not None and runtime.endpoint.startswith("ipc://")
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        try:
            with pytest.raises(UsageError, match=rf"of {used + 20} file descriptors open.*ulimit -n"):
                runtime.peer("A:0", f"ipc://{sockets}/nobody").call("x").result(HANG_S)
            with pytest.raises(UsageError, match="would end the process"):
                Runtime.start(name="d", socket_dir=sockets)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_call_without_a_descriptor_for_its_connection_fails_at_once(own_time: OwnTime) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlm-"))
        runtime = stack.enter_context(Runtime.start(name="c", socket_dir=sockets))
        peer = runtime.peer("A:0", f"unix://{sockets}/nobody").options(timeout_s=60)
        spare = [os.open(os.devnull, os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare[0] + 1, hard))
        try:
            began = time.monotonic()
            with pytest.raises(CallError, match="Too many open files"):
                peer.call("x").result(30)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(spare[0])
        assert own_time.since(began) < 5  # The samples are in a file, which takes a descriptor to read.
