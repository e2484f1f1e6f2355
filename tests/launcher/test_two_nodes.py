"""Two nodes by hand, over TCP on loopback: each a ``rlmesh launch`` of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlmesh.runtime.connections.security import write_key_file
from tests.launcher.nodes import node, two_nodes
from tests.master.launched import Launched, alive, descendants
from tests.own_time import HANG_S, OwnTime

NAMELESS = "import socket; socket.gethostname = socket.getfqdn = lambda *_: 'nowhere.invalid'; " \
           "from rlmesh.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"  # fmt: skip


def proven_empty(folder: Path) -> None:
    for rank in (0, 1):
        report = json.loads((folder / "run" / f"exit-node{rank}.json").read_text())
        assert all(item["removed"] for item in report["leftovers"]), report


def test_a_job_runs_over_two_nodes(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "127.0.0.1", "--size", "3000000") as (head, other):
        assert head.ended() == 0, head.output
        assert other.ended() == 0, other.output
    assert "places [(0, 0), (1, 1)]" in head.output
    assert "weights [9000000, 9000000] of 3000000" in head.output  # futures were passed from node to node
    assert "SPREAD:1 |" in other.output  # each node prints what its own members do
    assert "SPREAD:1 |" not in head.output
    assert "nodes 2" in head.output
    assert re.search(r"round trips between the nodes:\n +→ 0 +→ 1\n0 .* ·  +\d+\.\d ms\n1 .*\d ms +·", head.output)
    proven_empty(tmp_path)


@pytest.fixture(scope="module")
def slowness() -> float:
    """How much longer than 1.8 s it takes here to import torch: that is most of the start of a job with torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=60)
    return max(1.0, (time.monotonic() - began) / 1.8)


@pytest.mark.slow
@pytest.mark.case("O9")
@pytest.mark.parametrize(("host", "advertised"), [
    ("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]"), ("127.0.0.2", "127.0.0.2"),
])  # fmt: skip
def test_names_that_do_not_resolve(tmp_path: Path, host: str, advertised: str, slowness: float) -> None:
    began = time.monotonic()
    with two_nodes(tmp_path, host, "--torch", prefix=["-c", NAMELESS]) as (head, other):
        head.wait_for("places")
        started_s = time.monotonic() - began
        assert (head.ended(), other.ended()) == (0, 0), head.output + other.output
    endpoint = next(line for line in head.output.splitlines() if "listens at" in line).rpartition(" ")[2]
    assert endpoint.startswith(f"{advertised}:")
    assert f"master {advertised.strip('[]')} " in head.output
    assert "[[" not in head.output
    assert "sums [3, 3]" in head.output
    assert started_s <= 5.0 * slowness


@pytest.mark.case("O9")
def test_an_unreachable_head_is_told_with_addresses_and_errno(tmp_path: Path, own_time: OwnTime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    began = time.monotonic()
    with node(tmp_path, 1, 2, f"localhost:{port}", options=["--rdzv-conf", "join_timeout=1"]) as other:
        assert other.ended() == 1
    assert own_time.since(began) < 5.0
    assert f"the head of the job, localhost:{port}, was not reached within 1 s" in other.output
    assert f"127.0.0.1:{port}: Connection refused (errno 111)" in other.output


@pytest.mark.case("O9")
def test_a_head_whose_name_does_not_resolve_is_told(tmp_path: Path) -> None:
    with node(tmp_path, 1, 2, "nowhere.invalid:7", options=["--rdzv-conf", "join_timeout=1"]) as other:
        assert other.ended() == 1
    assert "nowhere.invalid:7: the name does not resolve" in other.output


@pytest.mark.slow
def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    with node(tmp_path, 0, 3, "127.0.0.1:0", options=["--rdzv-conf", "join_timeout=4"]) as head:
        endpoint = head.wait_for(r"listens at (\S+)")[1]
        with node(tmp_path, 2, 3, endpoint) as other:
            assert head.ended() == 1
            assert other.ended() == 1, other.output
    assert "not all nodes joined within 4 s" in head.output
    assert "missing: node rank 1." in head.output
    assert f"pid {other.process.pid})" in head.output


def test_a_node_with_another_key_is_turned_away(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write_key_file(tmp_path / "b" / "job.key")
    with node(tmp_path, 0, 2, "127.0.0.1:0", options=["--rdzv-conf", "join_timeout=3"]) as head:
        endpoint = head.wait_for(r"listens at (\S+)")[1]
        with node(tmp_path / "b", 1, 2, endpoint) as other:
            assert other.ended() == 1
        assert head.ended() == 1
    assert "does not hold the key of this job" in other.output


def test_without_a_key_keygen_is_named(tmp_path: Path) -> None:
    words = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "127.0.0.1:1"]
    with Launched(["-m", "rlmesh.cli.main", "launch", *words], tmp_path) as launched:
        assert launched.ended() == 2
    assert "rlmesh keygen" in launched.output


@pytest.mark.slow
def test_the_failure_of_the_script_ends_all_nodes(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "127.0.0.1", "--fail") as (head, other):
        assert (head.ended(), other.ended()) == (1, 1)
    assert "no luck in run" in head.output
    proven_empty(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["head", "other"])
def test_ctrl_c_at_any_node_ends_all(tmp_path: Path, which: str) -> None:
    with two_nodes(tmp_path, "127.0.0.1", "--sleep", "60") as (head, other):
        head.wait_for("step 0")
        (head if which == "head" else other).interrupt()
        assert head.ended() == 130, head.output
        assert other.ended() == 130, other.output
    proven_empty(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["head", "other"])
def test_a_launch_that_is_killed_leaves_nothing_anywhere(tmp_path: Path, which: str, own_time: OwnTime) -> None:
    with two_nodes(tmp_path, "127.0.0.1", "--sleep", "60") as (head, other):
        head.wait_for("step 0")
        pids = descendants(head.process.pid) + descendants(other.process.pid)
        os.kill((head if which == "head" else other).process.pid, signal.SIGKILL)
        assert head.ended() != 0
        assert other.ended() != 0
        own_time.holds_within(5.0, lambda: not any(map(alive, pids)))
        assert not [pid for pid in pids if alive(pid)]


def test_the_port_of_the_head_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with node(tmp_path, 0, 2, f"127.0.0.1:{port}") as head:
            assert head.ended() == 1
    assert f"cannot listen at 127.0.0.1:{port}" in head.output
    assert "--rdzv-endpoint" in head.output


def test_a_script_that_ends_at_once_does_not_let_the_others_wait(tmp_path: Path) -> None:
    """They look for the head again and again, and have hardly seen it."""
    script = tmp_path / "bad.py"
    script.write_text("raise ValueError('mine')\n")
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            other = stack.enter_context(node(tmp_path, 1, 2, endpoint))
            free.settimeout(HANG_S)
            free.accept()[0].close()  # it has begun to look
        with node(tmp_path, 0, 2, endpoint, script=script) as head:
            assert head.ended() == 1
        assert other.ended() == 1
    assert "the job is over: the head's script ended with an error" in other.output


def test_the_other_nodes_need_the_port_that_node_0_got(tmp_path: Path) -> None:
    with node(tmp_path, 1, 2, "127.0.0.1:0") as other:
        assert other.ended() == 2
    assert "127.0.0.1:0: with port 0 the system chooses one for node 0, which prints it" in other.output


@pytest.mark.slow
def test_nodes_without_ranks_get_them_in_the_order_of_arrival(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with node(tmp_path, None, 2, endpoint) as first:
        first.wait_for("listens at")
        with node(tmp_path, None, 2, endpoint) as second:
            assert (first.ended(), second.ended()) == (0, 0), first.output + second.output
    assert "SPREAD:1 |" in second.output
