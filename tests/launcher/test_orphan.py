"""A task of a Slurm job whose first node is lost, as far as it needs no Slurm."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from rlmesh_launcher.orphan import POLL_S, VARIABLE, WATCH_S, look_after, verdict
from rlmesh_launcher.slurm import Task


def task(rank: int) -> Task:
    return Task("17", "0", rank, 4, rank, f"n{rank + 1}")


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("RUNNING n1 n[1-3]\n", "wait"),
        ("RUNNING n1 n[2-3]\n", "orphaned"),
        ("RUNNING n1 n2", "orphaned"),
        ("COMPLETING n1 n[2-3]", "wait"),
        ("PENDING n/a ", "over"),
        ("", "over"),
        ("RUNNING n1 n[[", "wait"),
        ("RUNNING n1 n2\nRUNNING n3 n[3-4]", "orphaned"),
        ("RUNNING n1 n[1-2]\nRUNNING n3 n4\n", "wait"),
    ],
)
def test_what_slurm_says(said: str, what: str) -> None:
    assert verdict(said) == what


class Cluster:
    """Answers as ``squeue`` would, one after the other, and notes what else it is told."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.told, self.slept = list(answers), [], list[float]()  # type: ignore[var-annotated]

    def run(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if argv[0] != "squeue":
            self.told.append(argv)
            return subprocess.CompletedProcess(argv, 0, "", "")
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return subprocess.CompletedProcess(argv, 1 if said == "?" else 0, said, "")

    def look_after(self, rank: int, wish: str, port: int) -> Cluster:
        env = {VARIABLE: wish, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_SRUN_COMM_PORT": str(port)}
        look_after(task(rank), env, run=self.run, clock=lambda: sum(self.slept), sleep=self.slept.append)
        return self


@pytest.fixture
def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("wish", "command"), [("requeue", ["scontrol", "requeue", "17"]), ("cancel", ["scancel", "17"])]
)
def test_an_orphan_waits_for_slurm_and_does_what_was_said(wish: str, command: list[str], closed: int) -> None:
    slurm = Cluster("RUNNING n1 n[1-4]", "?", "RUNNING n1 n[2-4]", "").look_after(2, wish, closed)
    assert slurm.told == [command]
    assert slurm.slept == [2 * POLL_S] * 3


@pytest.mark.case("s01")
@pytest.mark.parametrize("wish", ["requeue", "cancel"])
def test_an_element_of_an_array_asks_and_acts_for_itself_alone(wish: str, closed: int) -> None:
    """The last element has the number of the array, by which all would be cancelled."""
    asked: list[list[str]] = []

    def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(argv)
        said = "" if len(asked) > 2 else "RUNNING n1 n2"
        return subprocess.CompletedProcess(argv, 0, said if argv[0] == "squeue" else "", "")

    env = {VARIABLE: wish, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_SRUN_COMM_PORT": str(closed)}
    last = Task("17", "0", 1, 4, 1, "n2", array="17_3")
    look_after(last, env, run=run, clock=lambda: 0.0, sleep=lambda s: None)
    assert len(asked) == 3 and all("17_3" in "".join(argv) for argv in asked)


def test_an_orphan_does_not_watch_for_ever(closed: int) -> None:
    slurm = Cluster("RUNNING n1 n[1-4]").look_after(1, "cancel", closed)
    assert not slurm.told and sum(slurm.slept) == WATCH_S


@pytest.mark.parametrize(("rank", "wish"), [(1, ""), (1, "rm -rf"), (3, "cancel"), (0, "cancel")])
def test_others_end_at_once(rank: int, wish: str, closed: int) -> None:
    slurm = Cluster("RUNNING n1 n2").look_after(rank, wish, closed)
    assert not slurm.told and not slurm.slept


def test_where_srun_is_there_the_job_ends_by_itself(listening: int) -> None:
    slurm = Cluster("RUNNING n1 n2").look_after(1, "cancel", listening)
    assert not slurm.told and not slurm.slept
