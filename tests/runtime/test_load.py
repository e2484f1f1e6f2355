"""Many calls and large ones, between two processes: memory stays flat, nothing is lost, nobody waits behind bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import PayloadTooLarge
from rlmesh.runtime.connections.network import NetworkOptions
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.transport.base import TRANSPORT_VARIABLE
from tests.own_time import HANG_S, OwnTime
from tests.runtime.conftest import KEY
from tests.runtime.loaded import ARRAY_BYTES, BURST, CALLS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "tests.runtime.loaded"]


@pytest.fixture(params=["unix", pytest.param("zmq", marks=pytest.mark.slow)])
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a server in a process of its own."""
    monkeypatch.setenv(TRANSPORT_VARIABLE, request.param)
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        command = [*PROGRAM, "server", KEY.hex(), directory]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdin is not None
            try:
                yield process.stdout.readline().strip()
                process.stdin.close()
                assert process.wait(HANG_S) == 0
            finally:
                process.kill()


def client(endpoint: str, what: str) -> dict[str, Any]:
    command = [*PROGRAM, "client", KEY.hex(), endpoint, what]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    measured: dict[str, Any] = json.loads(run.stdout)
    return measured


@pytest.mark.case("O4")
def test_memory_is_flat_under_many_calls(endpoint: str) -> None:
    seen = client(endpoint, "many")
    assert (seen["answers"], seen["burst"]) == (CALLS, BURST)
    assert seen["in_flight"] <= 1024, "the burst is throttled"
    for who in ("client", "server"):
        (before, _), (after, peak) = seen[who]
        print(f"{who}: {before:.0f} MiB before, {after:.0f} after, {peak:.0f} at the peak")
        assert after - before <= 30 and peak - before <= 80
    (tasks, files), (tasks_after, files_after) = seen["resources"]
    assert tasks_after == tasks == 0 and files_after == files


@pytest.mark.case("O5")
def test_a_large_payload_stops_nobody(endpoint: str, own_time: OwnTime) -> None:
    seen = client(endpoint, "big")
    assert seen["equal"]
    pings = seen["pings"]
    print(f"{seen['took_s']:.2f} s there and back; the worst of {len(pings)} pings {pings[-1]:.3f} s")
    print(f"more memory at the peak, client and server, after each round: {seen['extra_mib']} MiB")
    assert pings and own_time.of(pings[int(len(pings) * 0.99)]) < 1
    assert len(seen["extra_mib"]) == 3
    assert max(map(max, seen["extra_mib"])) <= 1536, "in each round: what came home is room for what is sent next"


@pytest.mark.case("O5")
def test_a_payload_over_the_cap_is_refused_at_the_sender(endpoint: str) -> None:
    cap = NetworkOptions(max_payload_bytes=ARRAY_BYTES)
    with (
        Runtime.start(name="client", key=KEY, bind=False, network=cap) as runtime,
        pytest.raises(PayloadTooLarge, match=r"536,870,9\d\d bytes .* 536,870,912 bytes"),
    ):
        runtime.peer("S:0", endpoint).call("mirror", bytearray(ARRAY_BYTES + 1))
