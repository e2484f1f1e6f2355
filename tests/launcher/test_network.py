"""A job over machines whose cables are pulled and slowed; needs root (network namespaces)."""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher.machines import Machines, machines, why_not
from tests.launcher.nodes import node
from tests.master.launched import Launched
from tests.own_time import OwnTime

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]

HEAD = "10.77.0.1:29400"


@pytest.fixture
def two() -> Iterator[Machines]:
    with machines(2) as made:
        yield made


def start(stack: ExitStack, folder: Path, made: Machines, *arguments: str) -> tuple[Launched, Launched]:
    """Head on machine 1, the other node on machine 2."""
    head = stack.enter_context(node(folder, 0, 2, HEAD, *arguments, prefix=made.prefix_of(1)))
    return head, stack.enter_context(node(folder, 1, 2, HEAD, prefix=made.prefix_of(2)))


def test_a_job_runs_over_two_machines(tmp_path: Path, two: Machines) -> None:
    with ExitStack() as stack:
        head, other = start(stack, tmp_path, two, "--torch", "--size", "3000000")
        assert (head.ended(), other.ended()) == (0, 0), head.output + other.output
    assert "master 10.77.0.1 gloo eth0" in head.output
    assert "weights [9000000, 9000000] of 3000000" in head.output  # shared memory of one is none of the other's
    assert "sums [3, 3]" in head.output
    assert "0 (machine1, pid" in head.output and "1 (machine2, 10.77.0.2, pid" in head.output


def test_a_short_cut_is_outlived(tmp_path: Path, two: Machines) -> None:
    with ExitStack() as stack:
        head, other = start(stack, tmp_path, two, "--steps", "60", "--pause", "0.1")
        head.wait_for("step 5\n")
        two.pull(2)
        time.sleep(2.0)
        two.plug(2)
        assert (head.ended(), other.ended()) == (0, 0), head.output + other.output
    assert "TRAINER:0 | step 59" in head.output
    assert "late" not in head.output  # the call waited, and was answered


def test_calls_over_a_cut_cable_end_by_their_deadline(tmp_path: Path, two: Machines, own_time: OwnTime) -> None:
    with ExitStack() as stack:
        head, other = start(stack, tmp_path, two, "--steps", "40", "--pause", "0.2", "--deadline", "1")
        head.wait_for("step 3\n")
        two.pull(2)
        pulled = time.monotonic()
        late = head.wait_for(r"late: .*\n")[0]
        assert own_time.since(pulled) < 4.0
        two.plug(2)
        assert (head.ended(60.0), other.ended()) == (0, 0), head.output + other.output
    assert "SPREAD:1" in late  # the member that could not answer is named


def test_a_slow_cable_delays_and_breaks_nothing(tmp_path: Path, two: Machines) -> None:
    two.slow(2, "8mbit")
    with ExitStack() as stack:
        head, other = start(stack, tmp_path, two, "--steps", "5", "--size", "2000000")
        assert (head.ended(60.0), other.ended()) == (0, 0), head.output + other.output
    assert "weights [6000000, 6000000] of 2000000" in head.output


def test_a_machine_that_loses_its_power_is_named(tmp_path: Path, two: Machines) -> None:
    with ExitStack() as stack:
        head, other = start(stack, tmp_path, two, "--sleep", "300")
        head.wait_for("step 0\n")
        two.pull(2)  # no packet says goodbye
        other.process.kill()
        lost = time.monotonic()
        assert head.ended(90.0) == 1, head.output
        took = time.monotonic() - lost
    # Nobody was left on that machine to remove its folder of sockets, which here is on a file system that we share.
    for folder in Path(os.environ["XDG_RUNTIME_DIR"]).glob("rlm-*/n1"):
        shutil.rmtree(folder.parent, ignore_errors=True)
    assert re.search(r"node \S*machine2|node 1|machine2", head.output)
    assert took < 60.0


@pytest.fixture
def three() -> Iterator[Machines]:
    with machines(3) as made:
        yield made


def test_a_pair_that_does_not_reach_each_other_is_named_before_the_start(tmp_path: Path, three: Machines) -> None:
    three.separate(2, 3)  # both reach the head, as behind a firewall that knows only its port
    with ExitStack() as stack:
        head = stack.enter_context(node(tmp_path, 0, 3, HEAD, "--nodes", "3", prefix=three.prefix_of(1)))
        others = [stack.enter_context(node(tmp_path, n, 3, HEAD, prefix=three.prefix_of(n + 1))) for n in (1, 2)]
        assert head.ended() == 1, head.output
        assert [other.ended() for other in others] == [1, 1]
    assert "PreflightError (RM420)" in head.output
    assert "node machine2 does not reach node machine3" in head.output
    assert "FAILED" in head.output
    assert "is pid" not in head.output  # nothing was started


def test_a_head_that_cannot_be_reached(tmp_path: Path, two: Machines, own_time: OwnTime) -> None:
    two.pull(1)
    began = time.monotonic()
    options = ["--rdzv-conf", "join_timeout=2"]
    with node(tmp_path, 1, 2, HEAD, options=options, prefix=two.prefix_of(2)) as other:
        assert other.ended() == 1
    assert own_time.since(began) < 8.0
    assert re.search(r"10\.77\.0\.1:29400: .* \(errno \d+\)", other.output)


def test_a_node_without_a_route_to_the_head_waits_quietly(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with machines(1) as made:
        options = ["--rdzv-conf", "join_timeout=6"]
        with node(tmp_path, 1, 2, "10.99.0.1:29400", options=options, prefix=made.prefix_of(1)) as lonely:
            assert lonely.ended() == 1
    assert re.search(r"10\.99\.0\.1:29400: Network is unreachable \(errno 101\)", lonely.output), lonely.output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4.0
