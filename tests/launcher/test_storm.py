"""Many jobs that start at the same moment, on ports that nobody guesses."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlmesh.rendezvous.state import DEFAULT_PORT
from tests.launcher.nodes import two_nodes
from tests.master.launched import Launched

STORM = Path(__file__).with_name("storm_job.py")
JOBS, ROUNDS = 8, 5


def occupy(stack: ExitStack, *ports: int) -> None:
    """Somebody else has these ports, on every address."""
    for port in ports:
        try:
            stack.enter_context(socket.create_server(("", port)))
        except OSError:
            continue  # Somebody else has it indeed.


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.case("O8")
def test_jobs_that_start_at_once_on_taken_ports_all_start(tmp_path: Path) -> None:
    started = 0
    for number in range(ROUNDS):
        with ExitStack() as stack:
            occupy(stack, 29500, DEFAULT_PORT)
            jobs: list[Launched] = []
            for each in range(JOBS):
                folder = tmp_path / f"{number}-{each}"
                folder.mkdir()
                words = ["-m", "rlmesh.cli.main", "launch", "--view", "plain", str(STORM)]
                jobs.append(stack.enter_context(Launched(words, folder)))
            for job in jobs:
                assert job.ended(60.0) == 0, job.output
                assert "met own head: [True, True]" in job.output
                assert "in use" not in job.output
                started += 1
    assert started == JOBS * ROUNDS


@pytest.mark.slow
@pytest.mark.case("O8")
def test_jobs_of_two_nodes_run_side_by_side(tmp_path: Path) -> None:
    with ExitStack() as stack:
        occupy(stack, 29500, DEFAULT_PORT)
        nodes: list[Launched] = []
        for each in range(3):
            folder = tmp_path / str(each)
            folder.mkdir()
            nodes += stack.enter_context(two_nodes(folder, "127.0.0.1"))
        for node in nodes:
            assert node.ended(60.0) == 0, node.output
