"""A fault is told once, in few lines, with the way to the rest; a job that is stopped ends quietly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlmesh.driver.failure_report import failure_lines
from rlmesh.errors import JobFailed, RemoteError, UsageError
from rlmesh.master.chaos_plan import check_method, parse_kill, parse_kills
from rlmesh.observe.views.safe_text import shorten
from tests.master.launched import Launched
from tests.own_time import HANG_S

SCRIPT = """\
from rlmesh import DLJobBuilder, RoleGroup, rpc

class Worker:
    @rpc
    def work(self, x):
        return RoleGroup("V")[0].call("add", x).result()

class Adder:
    @rpc
    def add(self, x):
        return x + 1

class Trainer:
    def run(self):
        print(RoleGroup("W")[0].call("work", "a").result())

builder = DLJobBuilder().device_type("CPU")
builder.role("W").run(Worker).resource(cpu=0)
builder.role("V").run(Adder).resource(cpu=0)
builder.role("TRAINER").run(Trainer).resource(cpu=0)
if __name__ == "__main__":
    builder.build().submit("short")
"""
FAULT = 'can only concatenate str (not "int") to str'


@pytest.mark.case("n10")
@pytest.mark.parametrize("how", [(), ("-m", "rlmesh.cli.main", "launch")], ids=["python", "rlmesh launch"])
def test_a_bug_in_a_role_is_told_in_few_lines(how: tuple[str, ...], tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    with Launched([*how, str(script)], tmp_path) as job:
        assert job.ended() == 1
    lines = job.output.splitlines()
    of_the_job = [
        line for line in lines if any(word in line for word in (" started, run ", " starting", " ready", " exited"))
    ]
    assert len(lines) - len(of_the_job) <= 25, job.output
    assert "TypeError: TypeError" not in job.output and "Exception Group" not in job.output
    assert sum("return x + 1" in line for line in lines) == 1, "where it happened, once"
    assert FAULT in job.output.partition("First cause:\n")[2].partition("\n")[0]
    log = next(tmp_path.glob("runs/short-*/logs/TRAINER-0.log"))
    assert f"more lines in {log}" in job.output or log.read_text().count("\n") <= 12
    assert "What happened, in order: " in job.output and "Logs and metrics: " in job.output


def test_what_was_not_shown_is_told_with_its_traceback_and_still_short() -> None:
    text = "A:0 failed in run(): ValueError: no\ntraceback of A:0:\n" + "".join(f"    line {n}\n" for n in range(60))
    error = JobFailed("job toy failed: x", [RemoteError(text), *(RemoteError(f"B:{n} failed\nmore") for n in range(9))])
    error.run_dir, error.incident = "runs/toy", "runs/toy/incidents/0001.txt"
    lines = failure_lines(error)
    assert len(lines) <= 25 and "      line 59" in lines and any("more lines" in line for line in lines)
    assert "  and 6 more" in lines
    error.shown = True
    assert not any("line 59" in line for line in failure_lines(error))


def test_lines_are_cut_in_the_middle() -> None:
    lines = [str(number) for number in range(30)]
    short = shorten(lines, 10, "x.log")
    assert len(short) == 10 and short[:3] == ["0", "1", "2"] and short[-1] == "29"
    assert short[3] == "… 21 more lines in x.log …"
    assert shorten(lines, 30) == lines


@pytest.mark.case("n13")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("random:kills=0", "at least 1"),
        ("random:kills=1.5", "whole number"),
        ("random:within=-1", "not a time"),
        ("W:0@step=-1", "never reached"),
        ("W:0@after=nan", "never reached"),
        ("W:0@now+999", "no signal"),
        ("W:0@now+KILLL", "Did you mean 'SIGKILL'?"),
    ],
)
def test_kills_that_cannot_be_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        parse_kills([text], {"W": 2})


@pytest.mark.case("n13")
def test_a_method_that_nobody_exports_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"W exports no method 'scoree'\. Did you mean 'score'\?"):
        check_method(parse_kill("W:0@call=scoree"), ("score", "other"))
    check_method(parse_kill("W:0@call=score"), ("score", "other"))
    check_method(parse_kill("W:0@now"), ())


@pytest.mark.case("n13")
def test_rehearsals_that_would_do_nothing_are_refused_by_the_command(tmp_path: Path) -> None:
    for options, said in [
        (["--random", "0"], "at least 1"),
        (["--random", "1", "--at-step", "3"], "are for --kill"),
        (["--kill", "W:0", "--seed", "3"], "are for --random"),
    ]:
        command = [sys.executable, "-m", "rlmesh.cli.main", "chaos", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 2 and said in done.stderr, done.stderr


QUIET = textwrap.dedent("""\
    import os, subprocess, sys, time
    from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc

    class Worker:
        @rpc
        def score(self, s):
            print("scores", flush=True)
            time.sleep(s)

    class Trainer:
        def run(self):
            RoleGroup("W").call("score", 60.0).result()

    class Other(Trainer):
        pass

    builder = DLJobBuilder().device_type("CPU")
    builder.role("W").run(Worker).total(2).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    builder.role("OTHER").run(Other).resource(cpu=0)
    if __name__ == "__main__":
        builder.build().submit("quiet-end")
""")


@pytest.mark.slow
@pytest.mark.case("n13")
def test_a_wrong_method_is_refused_and_a_stop_is_quiet(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(QUIET)
    with Launched([str(script)], tmp_path) as job:
        job.wait_for(r"(?s)scores.*scores|scores  \(2 times\)")
        run_dir = str(next(tmp_path.glob("runs/quiet-end-*")))
        command = [sys.executable, "-m", "rlmesh.cli.main"]
        chaos = [*command, "chaos", run_dir, "--kill", "W:0", "--at-call", "scoree"]
        done = subprocess.run(chaos, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 2 and "W exports no method 'scoree'. Did you mean 'score'?" in done.stderr
        stopped = subprocess.run([*command, "stop", run_dir], capture_output=True, text=True, timeout=2 * HANG_S)
        assert stopped.returncode == 0, stopped.stderr
        job.ended()
    assert "Traceback" not in job.output and "PeerLost" not in job.output, job.output
    assert "rlmesh: job quiet-end was stopped: rlmesh stop" in job.output
