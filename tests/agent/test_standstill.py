"""Agents and guardians that stood still: they ask before they end anything, and keep members from running meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmesh.agent.master_session import Freezer
from rlmesh.agent.node_lease import STILL_S, Standstills
from rlmesh.agent.processes import ownership
from rlmesh.agent.processes.stopped import LOOKS, StoppedLooks, half_started, is_stopped
from tests.agent.processes import start_guardian
from tests.own_time import HANG_S


def stopped(pid: int) -> bool:
    return is_stopped(pid)


def until(what: object, wait_s: float = HANG_S) -> None:
    deadline = time.monotonic() + wait_s
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"it did not come about within {wait_s:g} s"
        time.sleep(0.01)


@pytest.mark.case("b20")
def test_a_standstill_is_noticed_by_its_gap_and_forgotten_after_a_lease() -> None:
    stills = Standstills(100.0)
    assert not stills.look(100.25) and not stills.lately(100.25, 3.0)
    assert stills.look(100.25 + STILL_S + 0.1), "longer than any look takes"
    assert not stills.look(101.6)
    assert stills.lately(104.0, 3.0) and not stills.lately(105.0, 3.0)


@pytest.mark.case("b20")
def test_members_are_stopped_with_all_that_is_below_them_and_let_go_on() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as member:
        assert member.stdout is not None
        below = int(member.stdout.readline())
        with subprocess.Popen(["sleep", "1000"]) as other:
            freezer = Freezer(lambda: [member.pid])
            freezer.freeze()
            assert freezer.active
            until(lambda: stopped(member.pid) and stopped(below))
            assert not stopped(other.pid)
            os.kill(member.pid, signal.SIGCONT)  # whoever stopped all of them lets them go on
            freezer.freeze()
            until(lambda: stopped(member.pid))
            freezer.thaw()
            assert not freezer.active
            until(lambda: not stopped(member.pid) and not stopped(below))
            for pid in (below, other.pid):
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_stays_stopped_is_found_by_looks_in_a_row() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        looks = StoppedLooks()
        assert looks.look([process.pid]) == []
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_stopped(process.pid))
        assert [looks.look([process.pid]) for _ in range(LOOKS - 1)] == [[]] * (LOOKS - 1)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: not is_stopped(process.pid))
        assert looks.look([process.pid]) == [], "it went on, so the count begins anew"
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_stopped(process.pid))
        assert [looks.look([process.pid]) for _ in range(LOOKS)][-1] == [process.pid]
        assert process.pid not in half_started(os.getpid()), "it is another program"
        process.kill()


SAYS = """
def say(seconds, frozen=False):
    until = None if seconds is None else time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
    print(json.dumps({"lease_until": until, "members": [child.pid], "frozen": frozen}), flush=True)

signal.signal(signal.SIGUSR1, lambda *_: say(1000.0))
say(1.0)
open(os.path.join(config["run_dir"], "said"), "w").close()
while True:
    signal.pause()
"""
STANDSTILL_S = 4.0


@pytest.mark.slow
@pytest.mark.case("b20")
@pytest.mark.parametrize("agent_goes_on", [True, False])
def test_a_guardian_that_stood_still_asks_its_agent_first(tmp_path: Path, agent_goes_on: bool) -> None:
    """All stop for longer than the lease; the guardian and the member go on, and only later the agent, or never."""
    guardian, fifo = start_guardian(tmp_path, f"test{os.getpid()}{time.monotonic_ns()}", SAYS)
    pids = fifo.read_json()
    until((tmp_path / "run" / "said").exists)  # the guardian reads what the agent has said, at the latest afterwards
    together = [pids["guardian"], pids["agent"], pids["child"]]
    for pid in together:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STANDSTILL_S)
    os.kill(pids["child"], signal.SIGCONT)
    os.kill(pids["guardian"], signal.SIGCONT)
    until(lambda: stopped(pids["child"]) or ownership.read_process(pids["child"]) is None)
    assert stopped(pids["child"]), "it does not run while nobody knows whether it may"
    if agent_goes_on:
        os.kill(pids["agent"], signal.SIGCONT)
        os.kill(pids["agent"], signal.SIGUSR1)
        until(lambda: not stopped(pids["child"]))
        time.sleep(0.5)
        assert guardian.poll() is None, "the lease is held again"
        os.kill(pids["agent"], signal.SIGKILL)
    guardian.wait(HANG_S)
    output, _ = guardian.communicate()
    report = json.loads(output)
    assert ("its lease ended" in report["why"]) is not agent_goes_on, report
    assert ownership.read_process(pids["child"]) is None
