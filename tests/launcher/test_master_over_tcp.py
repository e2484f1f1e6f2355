"""The master of a job of several nodes is killed: its agent starts it again, and the agents elsewhere take it on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.test_node_loss import finish, first_two, moving, nothing_ran_twice, pids_of
from tests.master.launched import Launched, alive
from tests.own_time import HANG_S, OwnTime

pytestmark = pytest.mark.slow
ADOPTED_S = 4.0
"""Half a second on a quiet machine."""


def kill_master(head: Launched) -> None:
    os.kill(head.pid_of("prime_master"), signal.SIGKILL)


def registered(folder: Path, node_rank: int) -> int:
    lines = (folder / "run" / "events.jsonl").read_text().split("\n")[:-1]  # the last one may be under way
    events = [json.loads(line) for line in lines if '"AgentRegistered"' in line]
    return sum(f"'node_rank': {node_rank}" in str(event) for event in events)


def await_registered(folder: Path, node_rank: int, times: int) -> None:
    deadline = time.monotonic() + HANG_S
    while registered(folder, node_rank) < times and time.monotonic() < deadline:
        time.sleep(0.02)
    assert registered(folder, node_rank) >= times, f"node {node_rank} did not come to the new master"


def test_agents_of_all_nodes_take_on_the_next_master(tmp_path: Path, own_time: OwnTime) -> None:
    with moving(tmp_path, 2, "--spares", "0", "--lease", "6") as nodes:
        head, other = nodes
        started = [*first_two(head, 0).values(), *first_two(other, 1).values()]
        members = [int(head.wait_for(r"TRAINER is pid (\d+)")[1]), *started]
        assert len(members) == 5
        for number in (2, 3):
            began = time.monotonic()
            kill_master(head)
            head.wait_for(f"master {number} of this job")
            for rank in (0, 1):
                await_registered(tmp_path, rank, number)
            assert own_time.since(began) < ADOPTED_S
            assert all(map(alive, members))
        time.sleep(7.0)  # longer than a lease: they were renewed by the new master
        assert all(map(alive, members)) and len(pids_of(head)) + len(pids_of(other)) == 4, "nothing was started anew"
        finish(tmp_path, nodes)
        assert other.ended() == 0, other.output
    nothing_ran_twice(tmp_path)


def test_a_node_that_is_lost_while_there_is_no_master_is_lost_to_the_next_one(tmp_path: Path) -> None:
    # The next master is there before the leases of the other nodes end.
    with moving(tmp_path, 3, "--lease", "6") as nodes:
        head, other, _ = nodes
        before = first_two(other, 1)
        agent = other.pid_of("-m rlmesh.agent")
        kill_master(head)
        os.kill(agent, signal.SIGKILL)
        head.wait_for(r"Rollout \[\(0, 0\), \(2, 1\)\]")
        head.wait_for(r"Actor \[\(0, 1\), \(2, 1\)\]")
        assert not any(map(alive, before.values()))
        finish(tmp_path, nodes)
    nothing_ran_twice(tmp_path)
