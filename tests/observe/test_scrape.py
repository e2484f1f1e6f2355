"""The metrics endpoint: its text by Prometheus' own parser, its server by real HTTP, its numbers by a real job."""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rlmesh.errors import UsageError
from rlmesh.observe.exposition import CONTENT_TYPE, Family, exposition
from rlmesh.observe.scrape import ScrapeServer, parse_address
from tests.master.launched import TOY, Launched

texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(st.tuples(texts, st.floats())), texts)
def test_any_label_and_number_survives(samples: list[tuple[str, float]], help: str) -> None:
    family = Family("rlmesh_x", help)
    for text, value in samples:
        family.add(value, label=text)
    read = [sample for found in text_string_to_metric_families(exposition([family])) for sample in found.samples]
    assert [sample.labels["label"] for sample in read] == [text for text, _ in samples]
    for sample, (_, value) in zip(read, samples, strict=True):
        assert sample.value == value or (math.isnan(sample.value) and math.isnan(value))


def test_counters_are_typed() -> None:
    family = Family("rlmesh_calls_total", "calls", "counter")
    family.add(7, method="m")
    (found,) = text_string_to_metric_families(exposition([family, Family("rlmesh_none", "no samples")]))
    assert (found.type, found.samples[0].name, found.samples[0].value) == ("counter", "rlmesh_calls_total", 7)


@pytest.mark.parametrize(("text", "address"), [
    ("127.0.0.1:9400", ("127.0.0.1", 9400)),
    ("0", ("127.0.0.1", 0)),
    ("localhost:1", ("127.0.0.1", 1)),
    ("[::1]:9", ("::1", 9)),
    ("unix:/a/b", Path("/a/b")),
])  # fmt: skip
def test_addresses(text: str, address: object) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["0.0.0.0:1", "example.org:1", "127.0.0.1:x", "127.0.0.1:70000", "unix:", ""])
def test_addresses_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


async def test_the_server_answers_only_what_it_should(tmp_path: Path) -> None:
    async def page() -> str:
        return "x 1\n"

    server = ScrapeServer(page)
    where = await server.start(("127.0.0.1", 0))
    port = int(re.search(r":(\d+)/", where)[1])  # type: ignore[index]
    try:
        good = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert good.startswith(b"HTTP/1.1 200 OK\r\n") and good.endswith(b"\r\n\r\nx 1\n")
        assert CONTENT_TYPE.encode() in good
        assert (await ask(port, b"HEAD /metrics?a=b HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\n")
        assert b" 404 " in await ask(port, b"GET / HTTP/1.1\r\n\r\n")
        assert b" 405 " in await ask(port, b"POST /metrics HTTP/1.1\r\n\r\n")
        assert b" 400 " in await ask(port, b"\x16\x03\x01 nonsense\r\n\r\n")
        assert await ask(port, b"x" * 100_000) == b"", "too long a head is no request"
    finally:
        await server.close()


async def test_a_unix_socket_is_private_and_replaces_a_dead_one(tmp_path: Path) -> None:
    async def page() -> str:
        return "x 1\n"

    path = tmp_path / "m"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = ScrapeServer(page)
    assert await server.start(path) == f"unix:{path}"
    assert path.stat().st_mode & 0o077 == 0
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(b"x 1\n")
    writer.close()
    await server.close()
    assert not path.exists()
    path.write_text("a file of somebody else")
    with pytest.raises(OSError):
        await ScrapeServer(page).start(path)
    assert path.read_text() == "a file of somebody else"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launched]:
    command = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--metrics", "127.0.0.1:0", str(TOY)]
    with Launched([*command, "--", "--sleep", "60"], tmp_path) as launched:
        launched.wait_for("step 1")
        yield launched
        os.kill(launched.process.pid, signal.SIGINT)
        assert launched.ended() == 130


def where(folder: Path) -> str:
    (run,) = (folder / "runs").iterdir()
    return (run / "metrics.address").read_text().strip()


def test_a_job_is_scraped(job: Launched, tmp_path: Path) -> None:
    deadline = time.monotonic() + 10.0
    found: dict[tuple[str, ...], float] = {}
    while ("rlmesh_calls_total", "TRAINER:0", "ADDER:1", "rank") not in found:
        assert time.monotonic() < deadline, found
        with urllib.request.urlopen(where(tmp_path), timeout=5) as answer:
            text = answer.read().decode()
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    assert found["rlmesh_job_stage", "running"] == 1 and found["rlmesh_job_stage", "failed"] == 0
    assert found["rlmesh_role_members", "ADDER"] == found["rlmesh_role_members_ready", "ADDER"] == 2
    assert found["rlmesh_member_up", "TRAINER", "0", "0"] == 1
    assert found["rlmesh_member_step", "TRAINER", "0", "0"] == 1
    assert found["rlmesh_member_resident_memory_bytes", "ADDER", "1", "0"] > 2**20
    assert found["rlmesh_reported", "TRAINER", "0", "total"] == 55
    assert found["rlmesh_call_seconds_total", "TRAINER:0", "ADDER:1", "rank"] > 0
    nodes = [value for key, value in found.items() if key[0] == "rlmesh_node_memory_available_bytes"]
    assert len(nodes) == 1 and nodes[0] > 2**20


PROMETHEUS = shutil.which("prometheus")


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH (.ci/run unpacks Debian's)")
def test_real_prometheus_takes_it(job: Launched, tmp_path: Path) -> None:
    target = where(tmp_path).removeprefix("http://").removesuffix("/metrics")
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: rlmesh, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    assert PROMETHEUS is not None
    argv = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'db'}"]
    with subprocess.Popen(
        [*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            deadline = time.monotonic() + 30.0
            while b'"rlmesh_member_step"' not in (body := query(port, "rlmesh_member_step")):
                assert time.monotonic() < deadline, body
                time.sleep(0.1)
            assert b'"1"]' in query(port, 'up{job="rlmesh"}')
        finally:
            server.terminate()


def query(port: int, text: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/api/v1/query?query=" + urllib.parse.quote(text))
        return connection.getresponse().read()
    except OSError as error:
        return str(error).encode()
    finally:
        connection.close()
