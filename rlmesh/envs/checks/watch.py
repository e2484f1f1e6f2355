"""Checks an environment in a process of its own, whose calls have deadlines."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from rlmesh.envs.checks.creation import called
from rlmesh.envs.checks.episodes import CheckPlan
from rlmesh.envs.checks.findings import EnvFinding, EnvReport, FindingList, findings_of
from rlmesh.envs.checks.recordings import TracedStep
from rlmesh.envs.checks.repeats import report_difference
from rlmesh.envs.checks.subject import GROUPS
from rlmesh.envs.environments.registry import registered_creator
from rlmesh.errors import UsageError

__all__ = ["CheckDeadlines", "check_env"]

STOPS = 2
"""After so many calls that hang or kill the process, the other checks are left out."""


@dataclass(frozen=True)
class CheckDeadlines:
    """Seconds that calls of the environment may take.

    Attributes:
        step_s: a step.
        reset_s: making, resetting or closing the environment.
        start_s: the start of the process, with imports.
    """

    step_s: float = 5.0
    reset_s: float = 60.0
    start_s: float = 120.0


@dataclass
class Course:
    """The messages that the processes have sent so far."""

    findings: list[dict[str, Any]] = field(default_factory=list)
    trace: list[TracedStep] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    call: str = ""
    kind: str = "start"
    stops: int = 0
    done: bool = False


def check_env(
    env: str | Callable[..., Any],
    *,
    config: Mapping[str, Any] | None = None,
    num_envs: int = 0,
    plan: CheckPlan | None = None,
    deadlines: CheckDeadlines | None = None,
) -> EnvReport:
    """Look for faults that make training wrong: `CHECKS` lists them.

    The environment runs in processes of its own, which end with the check. A call that does not return in time is
    reported with the line where it hangs.

    Args:
        env: a name of Gymnasium or of `register_env`, ``module:creator``, or a creator.
        config: configuration for an environment given by name.
        num_envs: makes a registered vector environment of so many.
        plan: seed and numbers of steps.
        deadlines: limits of each call.

    Raises:
        UsageError: there is no environment of this name.
    """
    plan, deadlines = plan or CheckPlan(), deadlines or CheckDeadlines()
    name = env if isinstance(env, str) else _name_of(env)
    creator = registered_creator(env) if isinstance(env, str) else env
    pickled = None if creator is None else _pickled(called(name, creator, config or {}))
    job = {"name": name, "pickled": pickled, "config": dict(config or {}), "num_envs": num_envs, "plan": asdict(plan)}
    course = Course(left=list(GROUPS))
    while course.left and course.stops < STOPS:
        _run(job, course, deadlines, hash_seed=1)
    left_out, first = tuple(course.left), course.trace
    if first and course.stops < STOPS and not any(each["check"] == "determinism" for each in course.findings):
        course.left = ["trace"]
        _run(job, course, deadlines, hash_seed=2)
        report_difference(
            FindingList(course.findings.append), first, course.trace,
            "two processes with the same seed and actions differ",
            "Do not depend on the order of sets, hash() or id(), on the clock, or on files that an environment wrote",
        )  # fmt: skip
    return EnvReport(name, tuple(_once(findings_of(course.findings))), left_out)


def _once(findings: list[EnvFinding]) -> Iterator[EnvFinding]:
    """Findings, without those that a second process told again."""
    seen = set()
    for finding in findings:
        if (finding.check, finding.what) not in seen:
            seen.add((finding.check, finding.what))
            yield finding


def _name_of(env: Any) -> str:
    return str(getattr(env, "__qualname__", None) or getattr(getattr(env, "func", env), "__name__", type(env).__name__))


def _pickled(env: Any) -> str:
    import cloudpickle

    return base64.b64encode(cloudpickle.dumps(env)).decode()


def _run(job: dict[str, Any], course: Course, deadlines: CheckDeadlines, hash_seed: int) -> None:
    """One process, until it is done, or a call hangs or kills it."""
    course.call, course.kind, course.done = "starting the process", "start", False
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlmesh.envs.checks.subject"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, env={**os.environ, "PYTHONHASHSEED": str(hash_seed)}, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as sink:
                sink.write(json.dumps({**job, "groups": course.left}).encode() + b"\n")
            in_time = _listen(process.stdout, course, deadlines)
            if not in_time:
                _report_hang(process, log, course, deadlines)
            elif not course.done:
                _report_death(process, log, course)
        except BrokenPipeError:
            _report_death(process, log, course)
        finally:
            process.stdout.close()
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    if not course.done:
        course.stops += 1
        course.left = course.left[1:]  # The check that hung would hang again.


def _listen(pipe: IO[bytes], course: Course, deadlines: CheckDeadlines) -> bool:
    """Take messages until the process is done or gone; False if a call exceeds its deadline."""
    limits = {"step": deadlines.step_s, "reset": deadlines.reset_s, "start": deadlines.start_s}
    unread, until = b"", time.monotonic() + limits["start"]
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not course.done:
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return False
        received = os.read(pipe.fileno(), 1 << 16)
        if not received:
            return True
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            _take(json.loads(line), course)
        until = time.monotonic() + limits[course.kind]
    return True


def _take(message: dict[str, Any], course: Course) -> None:
    if "usage" in message:
        raise UsageError(message["usage"])
    if "finding" in message:
        course.findings.append(message["finding"])
    elif "trace" in message:
        course.trace = [TracedStep(**step) for step in message["trace"]]
    elif "call" in message:
        course.call, course.kind = message["call"], message["kind"]
    elif "ends" in message:
        course.left = course.left[1:]
        course.kind = "start"  # Work between calls is the check's own.
    elif "done" in message:
        course.done = True


def _report_hang(process: subprocess.Popen[bytes], log: IO[str], course: Course, deadlines: CheckDeadlines) -> None:
    before = log.seek(0, os.SEEK_END)
    process.send_signal(signal.SIGUSR1)  # faulthandler writes the stack
    stack, until = "", time.monotonic() + 2
    while time.monotonic() < until and "File" not in stack:
        time.sleep(0.02)
        log.seek(before)
        stack = log.read()
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    own = [frame for frame in frames if "/rlmesh/envs/checks/" not in frame[0]]
    place = f"; it is at {own[0][0]}:{own[0][1]}, in {own[0][2]}" if own else ""
    limit = {"step": deadlines.step_s, "reset": deadlines.reset_s, "start": deadlines.start_s}[course.kind]
    option = {"step": "step_s", "reset": "reset_s", "start": "start_s"}[course.kind]
    finding = EnvFinding(
        "deadline", course.call, f"the call did not return within {limit:g} s{place}",
        f"Make it faster, or give it more time ({option}) if it is meant to take so long",
    )  # fmt: skip
    course.findings.append(asdict(finding))


def _report_death(process: subprocess.Popen[bytes], log: IO[str], course: Course) -> None:
    code = process.wait()
    log.seek(0)
    said = [line.strip() for line in log.read().splitlines() if line.strip()]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = f"; its last words: {said[-1][:200]}" if said else ""
    finding = EnvFinding(
        "exception", course.call, f"the process ended in this call ({how}){last}",
        "Run the call under a debugger; `python -X faulthandler` shows the line",
    )  # fmt: skip
    course.findings.append(asdict(finding))
