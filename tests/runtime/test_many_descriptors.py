"""A service with thousands of open files starts and follows jobs as any other program."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmesh import DLJobBuilder
from rlmesh.runtime.process.descriptors import await_readable, await_writable
from rlmesh.testing import LocalCluster

BEYOND_SELECT = 1024
"""``select.select`` refuses descriptors from this number on."""


class Trainer:
    def run(self) -> None:
        print("trained")


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * BEYOND_SELECT:
        pytest.skip(f"this user may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * BEYOND_SELECT), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    opened = [null]
    while opened[-1] < BEYOND_SELECT:
        opened.append(os.dup(null))
    yield
    for fd in opened:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_program_with_many_files_runs_a_job(tmp_path: Path) -> None:
    builder = DLJobBuilder()
    builder.role("TRAINER").run(Trainer)
    with LocalCluster(view="plain"):
        builder.build().submit("many", run_dir=tmp_path)
    assert (tmp_path / "logs" / "TRAINER-0.log").read_text() == "trained\n"


@pytest.mark.usefixtures("many_files")
def test_waits_for_descriptors_of_any_number() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert ours.fileno() > BEYOND_SELECT
        assert await_readable([ours.fileno(), theirs.fileno()], 0.0) == set()
        assert await_writable(ours.fileno(), 0.0)
        theirs.send(b"x")
        assert await_readable([ours.fileno(), theirs.fileno()], 5.0) == {ours.fileno()}
        while ours.send(b"x" * 4096, socket.MSG_DONTWAIT) == 4096 and await_writable(ours.fileno(), 0.0):
            pass
        assert not await_writable(ours.fileno(), 0.0)
        theirs.shutdown(socket.SHUT_RDWR)
        assert await_readable([ours.fileno()], 5.0) == {ours.fileno()}  # its end, as with select
        number = ours.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        await_readable([number], 0.0)
