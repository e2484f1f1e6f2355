"""``rlmesh launch --restart job --max-restarts N``: a job that fails starts again as a whole, from what it saved."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlmesh.cli.main import main
from tests.launcher.nodes import node
from tests.master.launched import Launched, alive
from tests.own_time import HANG_S

AGAIN = Path(__file__).with_name("again_job.py")
STARTS = r"rank (\d) starts at step (\d+), incarnation (\d), node (\d), pid (\d+)\n"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main([*words])
    return code, capsys.readouterr().out


def until_says(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """What ``rlmesh status`` says once it says this."""
    deadline = time.monotonic() + HANG_S
    while text not in (said := told(capsys, "status")[1]):
        assert time.monotonic() < deadline, f"{text} is not in\n{said}"
        time.sleep(0.05)
    return said


def starts(nodes: Sequence[Launched], incarnation: int) -> dict[int, tuple[int, int]]:
    """The step and the pid with which each rank started, in order of the ranks."""
    found = re.findall(STARTS, "".join(each.output for each in nodes))
    return {int(rank): (int(step), int(pid)) for rank, step, nth, _, pid in sorted(found) if int(nth) == incarnation}


def server(nodes: Sequence[Launched], incarnation: int) -> int:
    text = "".join(each.output for each in nodes)
    found = re.search(rf"server starts, incarnation {incarnation}, pid (\d+)", text)
    assert found, text
    return int(found[1])


def at_work(nodes: Sequence[Launched], incarnation: int) -> dict[int, tuple[int, int]]:
    """The ranks of an incarnation, once each has saved a step of its own."""
    deadline = time.monotonic() + HANG_S
    while not all(any(_has_saved(rank, incarnation, each.output) for each in nodes) for rank in (0, 1)):
        assert time.monotonic() < deadline, "".join(each.output for each in nodes)
        time.sleep(0.02)
    return starts(nodes, incarnation)


def _has_saved(rank: int, incarnation: int, text: str) -> bool:
    _, started, since = text.partition(f"rank {rank} starts at step ")
    while started and f"incarnation {incarnation}," not in since.partition("\n")[0]:
        _, started, since = since.partition(f"rank {rank} starts at step ")
    return f"rank {rank} has saved" in since


def fails_and_comes_back(nodes: Sequence[Launched], capsys: pytest.CaptureFixture[str]) -> None:
    """Two restarts from what was saved, and at the third failure the end."""
    before: list[int] = []
    saved = {0: -1, 1: -1}
    for incarnation in (0, 1, 2):
        begun = at_work(nodes, incarnation)
        assert all(begun[rank][0] > saved[rank] for rank in (0, 1)), "each goes on behind what it had saved"
        saved = {rank: step for rank, (step, _) in begun.items()}
        now = [pid for _, pid in begun.values()] + [server(nodes, incarnation)]
        assert not [pid for pid in before if alive(pid)] and not set(before) & set(now), "everybody is new"
        if incarnation:
            often = "once" if incarnation == 1 else "2 times"
            said = until_says(capsys, f"restarts: job {often}; last 0:0")
            assert re.search(r"last 0:0\d ago: TRAINER:1 .*killed by SIGKILL", said), said
            assert re.search(rf"TRAINER  2 running  .*restarted {often}", said), said
            assert re.search(rf"SERVER  1 ready  restarted {often}", said), said
        before = now
        os.kill(begun[1][1], signal.SIGKILL)
    assert [each.ended() for each in nodes] == [1] * len(nodes)
    assert not [pid for pid in before if alive(pid)]
    head = nodes[0]
    assert "the job was restarted 2 times, as often as --max-restarts allows, and failed again" in head.output
    assert re.search(r"Its first failure, \d+ s ago: TRAINER:1 .*killed by SIGKILL", head.output)
    code, said = told(capsys, "status")
    assert code == 1 and "restarts: job 2 times; last 0:" in said
    assert "first cause: the job was restarted 2 times" in said


OPTIONS = ("--restart", "job", "--max-restarts", "2")


@pytest.mark.slow
def test_a_launch_starts_again_on_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", *OPTIONS, str(AGAIN)]
    with Launched(words, tmp_path) as launched:
        fails_and_comes_back([launched], capsys)


@pytest.mark.slow
def test_a_launch_starts_again_over_two_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKS_PER_NODE", "1")
    with ExitStack() as stack:
        head = stack.enter_context(node(tmp_path, 0, 2, "127.0.0.1:0", options=OPTIONS, script=AGAIN))
        endpoint = head.wait_for(r"node 0 of 2 listens at (\S+)")[1]
        other = stack.enter_context(node(tmp_path, 1, 2, endpoint))
        fails_and_comes_back([head, other], capsys)
        assert {rank for rank, *_ in re.findall(STARTS, other.output)} == {"1"}, "ranks stay on their nodes"


@pytest.mark.slow
def test_a_job_that_is_started_again_can_succeed(tmp_path: Path) -> None:
    words = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", *OPTIONS, str(AGAIN), "--", "--steps", "80"]
    with Launched(words, tmp_path) as launched:
        os.kill(at_work([launched], 0)[1][1], signal.SIGKILL)
        assert launched.ended() == 0, launched.output
    assert "the job has succeeded" in launched.output
    (run,) = (tmp_path / "runs").iterdir()
    assert [(run / f"state.{rank}").read_text() for rank in (0, 1)] == ['{"step": 79}'] * 2
