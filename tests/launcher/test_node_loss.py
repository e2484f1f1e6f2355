"""Nodes that are lost: the job goes on elsewhere, and nothing ever runs twice."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.launcher.machines import machines, why_not
from tests.launcher.nodes import node
from tests.master.launched import Launched, alive, descendants
from tests.own_time import HANG_S

MOVING = Path(__file__).with_name("moving_job.py")


@contextmanager
def moving(folder: Path, nnodes: int, *arguments: str, endpoint: str = "127.0.0.1:0",
           prefixes: Sequence[Sequence[str]] = ((), (), ())) -> Iterator[list[Launched]]:  # fmt: skip
    """The nodes of the job, up and at work."""
    (folder / "pulses").mkdir()
    words = ["--pulses", str(folder / "pulses"), "--end", str(folder / "end"), *arguments]
    with ExitStack() as stack:
        head = stack.enter_context(node(folder, 0, nnodes, endpoint, *words, script=MOVING, prefix=prefixes[0]))
        there = head.wait_for(r"listens at (\S+)")[1]
        others = [stack.enter_context(node(folder, n, nnodes, there, prefix=prefixes[n])) for n in range(1, nnodes)]
        head.wait_for("step 0 Actor")
        yield [head, *others]


def finish(folder: Path, nodes: Sequence[Launched], *, was_cut: int = 0) -> None:
    """Let the job end, in good order.

    Args:
        was_cut: a node whose network was away. Its next packet may leave as late again as the network was away, so it
            may come too late to hear of the end, and finds that the head has ended.
    """
    (folder / "end").touch()
    head = nodes[0]
    assert head.ended() == 0, head.output
    assert "the job has succeeded" in head.output
    for rank, each in enumerate(nodes[1:], 1):
        code = each.ended()
        late = rank == was_cut and "has ended, and the job with it" in each.output
        assert code == 0 or late, f"node {rank}: {each.output}"


def first_two(node: Launched, rank: int) -> dict[str, int]:
    """The members that a node starts with, once both have said so."""
    for role in ("ROLLOUT", "ACTOR"):
        node.wait_for(rf"{role}:{rank}\.0 is pid")
    return pids_of(node)


def pids_of(node: Launched) -> dict[str, int]:
    """The members that a node has started."""
    return {name: int(pid) for name, pid in re.findall(r"(\w+:\d\.\d) is pid (\d+)", node.output)}


def lives(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """When each member's processes lived, by incarnation: first and last pulse."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((folder / "pulses").iterdir(), key=lambda path: int(path.suffix[1:])):
        times = [float(line.split()[0]) for line in path.read_text().splitlines() if line.count(" ") == 1]
        pids = {line.split()[1] for line in path.read_text().splitlines() if line.count(" ") == 1}
        assert len(pids) == 1, f"two processes were {path.name}"
        found.setdefault(path.stem, []).append((times[0], times[-1]))
    return found


def nothing_ran_twice(folder: Path) -> None:
    for name, spans in lives(folder).items():
        for (_, ended), (began, _) in itertools.pairwise(spans):
            assert ended < began, f"{name} had two processes for {ended - began:.2f} s"


def test_members_of_an_agent_that_is_killed_go_to_the_spare_node(tmp_path: Path) -> None:
    with moving(tmp_path, 3) as nodes:
        head, other, spare = nodes
        trainer = int(head.wait_for(r"TRAINER is pid (\d+)")[1])
        before = first_two(other, 1)
        assert set(before) == {"ROLLOUT:1.0", "ACTOR:1.0"}
        os.kill(other.pid_of("-m rlmesh.agent"), signal.SIGKILL)
        head.wait_for(r"Rollout \[\(0, 0\), \(2, 1\)\]")
        head.wait_for(r"Actor \[\(0, 1\), \(2, 1\)\]")
        assert alive(trainer) and not any(map(alive, before.values()))
        finish(tmp_path, nodes)
        assert {"ROLLOUT:1.1", "ACTOR:1.1"} <= set(pids_of(spare))
    nothing_ran_twice(tmp_path)


@pytest.mark.slow
def test_an_agent_that_is_stopped_loses_its_members_before_they_start_elsewhere(tmp_path: Path) -> None:
    with moving(tmp_path, 3) as nodes:
        head, other, _ = nodes
        before = first_two(other, 1)
        agent = other.pid_of("-m rlmesh.agent")
        os.kill(agent, signal.SIGSTOP)
        time.sleep(0.5)
        assert all(map(alive, before.values())), "its members run on"
        head.wait_for(r"Rollout \[\(0, 0\), \(2, 1\)\]")
        with suppress(ProcessLookupError):
            os.kill(agent, signal.SIGCONT)
        assert not any(map(alive, before.values()))
        head.wait_for(r"Actor \[\(0, 1\), \(2, 1\)\]")
        finish(tmp_path, nodes)
    nothing_ran_twice(tmp_path)


@pytest.mark.slow
@pytest.mark.case("b20")
def test_members_of_a_node_that_was_suspended_alone_do_not_run_again(tmp_path: Path) -> None:
    """The master has placed them elsewhere when their node goes on; its agent is let go on before they are."""
    with moving(tmp_path, 3) as nodes:
        head, other, _ = nodes
        before = first_two(other, 1)
        stopped = [other.process.pid, *descendants(other.process.pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        head.wait_for(r"Rollout \[\(0, 0\), \(2, 1\)\]")
        head.wait_for(r"Actor \[\(0, 1\), \(2, 1\)\]")
        for pid in stopped:
            if pid not in before.values():
                os.kill(pid, signal.SIGCONT)
        log = tmp_path / "run" / "logs" / "agent-1.log"
        wait_for_text(log, "ran out in a standstill; the master is asked")
        wait_for_text(log, "its members may run elsewhere now; they are ended here")
        wait_until_gone(before.values())
        finish(tmp_path, nodes)
    nothing_ran_twice(tmp_path)


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + HANG_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, f"{text!r} does not come: {path.read_text()}"
        time.sleep(0.02)


def wait_until_gone(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + HANG_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_without_a_spare_the_job_ends_and_says_what_to_do(tmp_path: Path) -> None:
    with moving(tmp_path, 2, "--spares", "0") as nodes:
        head, other = nodes
        os.kill(other.pid_of("-m rlmesh.agent"), signal.SIGKILL)
        assert head.ended() == 1
    assert re.search(r"the agent of node \S+ .*; its members ended with it: ROLLOUT:1, ACTOR:1", head.output)
    assert "cannot be moved to other nodes" in head.output
    assert "spare_nodes(1)" in head.output


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
def test_a_node_that_is_cut_off_ends_its_members_and_is_a_spare_when_it_is_back(tmp_path: Path) -> None:
    prefixes = []
    with machines(3) as cables:
        prefixes = [cables.prefix_of(number) for number in (1, 2, 3)]
        with moving(tmp_path, 3, endpoint="10.77.0.1:29400", prefixes=prefixes) as nodes:
            head, other, _ = nodes
            other.wait_for("ACTOR:1.0 is pid")
            cables.pull(2)
            head.wait_for(r"Actor \[\(0, 1\), \(2, 1\)\]")
            cables.plug(2)
            log = tmp_path / "run" / "logs" / "agent-1.log"
            deadline = time.monotonic() + HANG_S
            while "they are ended here" not in log.read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert "they are ended here" in log.read_text()
            events = tmp_path / "run" / "events.jsonl"
            while events.read_text().count("AgentRegistered") < 4 and time.monotonic() < deadline + HANG_S:
                time.sleep(0.05)
            assert events.read_text().count("AgentRegistered") >= 4, "it did not come back"
            cables.pull(3)  # the node that was cut off before is the spare one now
            head.wait_for(r"Actor \[\(0, 2\), \(1, 2\)\]", 60.0)
            cables.plug(3)
            finish(tmp_path, nodes, was_cut=2)
    nothing_ran_twice(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
def test_members_without_room_wait_for_their_node(tmp_path: Path) -> None:
    with machines(2) as cables:
        prefixes = [cables.prefix_of(number) for number in (1, 2)]
        words = ["--spares", "0", "--node-wait", "60"]
        with moving(tmp_path, 2, *words, endpoint="10.77.0.1:29400", prefixes=prefixes) as nodes:
            head, other = nodes
            trainer = head.wait_for(r"TRAINER is pid \d+")[0]
            other.wait_for("ACTOR:1.0 is pid")
            cables.pull(2)
            head.wait_for("is restarted .* its lease is over")
            cables.plug(2)
            head.wait_for(r"Rollout \[\(0, 0\), \(1, 1\)\]", 60.0)
            head.wait_for(r"Actor \[\(0, 1\), \(1, 1\)\]")
            assert head.output.count(trainer) == 1, "the others keep their processes"
            finish(tmp_path, nodes, was_cut=1)
    nothing_ran_twice(tmp_path)
