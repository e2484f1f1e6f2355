"""The metrics endpoint: its text by Prometheus' own parser, its server by real HTTP, its numbers by a real job."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from rlmesh.errors import UsageError
from rlmesh.master.monitoring.metrics_page import page_text
from rlmesh.observe.prometheus import CONTENT_TYPE, ListenSocket, ScrapeServer, check_free, parse_address
from tests.master.launched import ROOT, TOY, Launched
from tests.own_time import HANG_S

texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(st.tuples(texts, st.floats())), texts)
def test_any_label_and_number_survives(samples: list[tuple[str, float]], help: str) -> None:
    family = GaugeMetricFamily("rlmesh_x", help, labels=("label",))
    for text, value in samples:
        family.add_metric((text,), value)
    read = [sample for found in text_string_to_metric_families(page_text([family])) for sample in found.samples]
    assert [sample.labels["label"] for sample in read] == [text for text, _ in samples]
    for sample, (_, value) in zip(read, samples, strict=True):
        assert sample.value == value or (math.isnan(sample.value) and math.isnan(value))


def test_counters_are_typed() -> None:
    family = CounterMetricFamily("rlmesh_calls", "calls", labels=("method",))
    family.add_metric(("m",), 7)
    none = GaugeMetricFamily("rlmesh_none", "no samples", labels=("x",))
    (found,) = text_string_to_metric_families(page_text([family, none]))
    assert (found.type, found.samples[0].name, found.samples[0].value) == ("counter", "rlmesh_calls_total", 7)


def test_other_jobs_do_not_load_the_client_library() -> None:
    program = (
        "import rlmesh.master.prime_master, rlmesh.cli.commands.launch, sys; print('prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("text", "address"), [
    ("127.0.0.1:9400", ("127.0.0.1", 9400)),
    ("0", ("127.0.0.1", 0)),
    ("localhost:1", ("127.0.0.1", 1)),
    ("[::1]:9", ("::1", 9)),
    ("unix:/a/b", Path("/a/b")),
])  # fmt: skip
def test_an_address_of_this_machine_is_parsed(text: str, address: object) -> None:
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


async def _page() -> str:
    return "x 1\n"


@pytest.mark.case("a16")
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
async def test_a_socket_of_another_program_stays(tmp_path: Path, kind: socket.SocketKind) -> None:
    path = tmp_path / "m"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            other.listen(0)
        before = path.lstat()
        for _ in range(3):  # the queue of who listens and does not accept fills up
            with pytest.raises(UsageError, match=rf"unix:{path}.*another program.*listens there.*--metrics ADDRESS"):
                check_free(f"unix:{path}")
            server = ScrapeServer(_page)
            with pytest.raises(OSError, match="another program"):
                await server.start(path)
            await server.close()
        assert path.lstat() == before


@pytest.mark.case("a16")
@pytest.mark.parametrize("what", ["a file", "a folder", "a link", "a named pipe"])
async def test_what_is_no_socket_stays(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m"
    make: dict[str, Callable[[], object]] = {
        "a file": lambda: path.write_text("mine"),
        "a folder": path.mkdir,
        "a link": lambda: path.symlink_to(tmp_path / "nothing"),
        "a named pipe": lambda: os.mkfifo(path),
    }
    make[what]()
    before = path.lstat()
    with pytest.raises(UsageError, match=f"there is {what} at this path already"):
        check_free(f"unix:{path}")
    server = ScrapeServer(_page)
    with pytest.raises(OSError, match=what):
        await server.start(path)
    await server.close()
    assert path.lstat() == before


@pytest.mark.case("a16")
def test_addresses_that_cannot_be_had_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        check_free(f"unix:{tmp_path}/none/m")
    with pytest.raises(UsageError, match=r"bytes, and a socket's may have 107"):
        check_free(f"unix:{tmp_path}/{'x' * 200}")
    check_free(f"unix:{tmp_path}/free")
    check_free("127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="in use"):
        check_free(f"127.0.0.1:{other.getsockname()[1]}")


@pytest.mark.case("a16")
async def test_at_the_end_only_its_own_socket_goes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    server = ScrapeServer(_page)
    await server.start(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        await server.close()
        assert path.exists()


@pytest.mark.case("a16")
def test_of_many_that_find_a_dead_socket_one_gets_the_path(tmp_path: Path) -> None:
    for turn in range(20):
        path = tmp_path / f"m{turn}"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        begin = threading.Barrier(8)

        def listen(path: Path = path, begin: threading.Barrier = begin) -> ListenSocket | None:
            begin.wait(HANG_S)
            with contextlib.suppress(OSError):
                return ListenSocket(path)
            return None

        with ThreadPoolExecutor(8) as pool:
            got = [each.result() for each in [pool.submit(listen) for _ in range(8)]]
        (one,) = [each for each in got if each is not None]
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
        one.remove()
        one.socket.close()
        assert not path.exists()


@pytest.mark.case("a16")
def test_a_job_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "m"
    command = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", "--metrics", "unix:m", str(TOY)]
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}, check=False,
        )  # fmt: skip
        assert done.returncode != 0 and f"metrics cannot be served at 'unix:{path}'" in done.stderr, done
        assert f"another program (pid {os.getpid()}) listens there" in done.stderr
        assert not list(tmp_path.glob("runs/*/logs/*.log")), "a process was started"
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))


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
    deadline = time.monotonic() + HANG_S
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def value(name: str, **labels: str) -> float | None:
        return found.get((name, frozenset(labels.items())))

    edge = {"caller": "TRAINER:0", "callee": "ADDER:1", "method": "rank"}
    while value("rlmesh_calls_total", **edge) is None:
        assert time.monotonic() < deadline, found
        with urllib.request.urlopen(where(tmp_path), timeout=5) as answer:
            text = answer.read().decode()
        found.update(
            ((sample.name, frozenset(sample.labels.items())), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )
    trainer, adder = {"role": "TRAINER", "rank": "0"}, {"role": "ADDER", "rank": "1"}
    assert value("rlmesh_job_stage", stage="running") == 1 and value("rlmesh_job_stage", stage="failed") == 0
    assert value("rlmesh_role_members", role="ADDER") == value("rlmesh_role_members_ready", role="ADDER") == 2
    assert value("rlmesh_member_up", **trainer, node="0") == 1
    assert value("rlmesh_member_step", **trainer, node="0") == 1
    assert (value("rlmesh_member_resident_memory_bytes", **adder, node="0") or 0) > 2**20
    assert value("rlmesh_reported", **trainer, metric="total") == 55
    assert (value("rlmesh_call_seconds_total", **edge) or 0) > 0
    nodes = [value for (name, _), value in found.items() if name == "rlmesh_node_memory_available_bytes"]
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
            deadline = time.monotonic() + HANG_S
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
