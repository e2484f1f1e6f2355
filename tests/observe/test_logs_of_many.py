"""Logs keep ranks, and a reader that does not read stops nobody."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.master.launched import ROOT
from tests.observe import loud_job

ARGV = [sys.executable, "-m", "rlmesh.cli.main", "launch", "--view", "plain", str(Path(loud_job.__file__))]


def start(folder: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    return subprocess.Popen(
        [*ARGV], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def check_files(run: Path) -> None:
    """Each member's file has all that it wrote, byte by byte."""
    same = b"the same at all ranks\n" * loud_job.SAME_LINES
    for rank in range(loud_job.RANKS):
        expected = f"rank {rank} of {loud_job.RANKS}\n".encode() + same
        if rank == loud_job.BURST:
            count = loud_job.BURST_BYTES // 100
            expected += "".join(loud_job.burst_line(number) + "\n" for number in range(count)).encode()
        if rank == loud_job.NO_TEXT:
            expected += b"caf\xe9 \xff\xfe end\n"
        if rank == loud_job.HALF:
            expected += b"half a li"
        written = (run / "logs" / f"LOUD-{rank}.log").read_bytes()
        assert written[: len(expected)] == expected, f"rank {rank}: {written[:200]!r}… {written[-200:]!r}"


@pytest.mark.case("O28")
def test_logs_keep_ranks(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        output = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 1, output[-2000:]
    lines = output.splitlines()
    for rank in range(loud_job.RANKS):
        assert f"LOUD:{rank} | rank {rank} of {loud_job.RANKS}" in lines, f"rank {rank}"
    same = [line for line in lines if "| the same at all ranks" in line]
    times = [re.search(r"LOUD:(\S+) \| .*?(?:\((\d+) times\))?$", line) for line in same]
    assert sum(int(found[2] or 1) for found in times if found) == loud_job.RANKS * loud_job.SAME_LINES
    said_by: set[int] = set()
    for found in times:
        assert found
        for part in found[1].split(","):
            first, _, last = part.partition("-")
            said_by |= set(range(int(first), int(last or first) + 1))
    assert said_by == set(range(loud_job.RANKS))
    assert len(same) < 100
    bursts = [line.partition(" | ")[2] for line in lines if line.startswith(f"LOUD:{loud_job.BURST} | burst ")]
    assert bursts == [loud_job.burst_line(number) for number in range(loud_job.BURST_BYTES // 100)]
    assert f"LOUD:{loud_job.NO_TEXT} | caf\ufffd \ufffd\ufffd end" in lines
    assert f"LOUD:{loud_job.HALF} | half a li" in lines
    check_files(run_of(tmp_path))


@pytest.mark.case("O28")
def test_a_reader_that_does_not_read_stops_nobody(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        deadline = time.monotonic() + 60.0
        # Nothing is read: the pipe is full long before the job is over.
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() == 1
        run = run_of(tmp_path)
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(loud_job.STEPS))
        check_files(run)
        assert process.stdout is not None
        process.stdout.close()
