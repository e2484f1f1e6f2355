"""Common parts of the commands about jobs: finding the job, calling its master, choosing members, reporting errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh import private_files
from rlmesh.driver.outcome import interrupt_code
from rlmesh.errors import JobFailed, RemoteError, RLMeshError, UsageError
from rlmesh.job.masking import mask_text
from rlmesh.observe.views.safe_text import shown
from rlmesh.run_directory.discovery import RunningJob, find_job, running_jobs
from rlmesh.run_directory.records import EndedJob, ended_jobs, has_run, read_end

if TYPE_CHECKING:
    from rlmesh.runtime.handle import MemberHandle

ASK_TIMEOUT_S = 10.0
SHOWN_OTHERS = 3


def age(seconds: float) -> str:
    """Seconds as ``1:02`` or ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def headline(job: RunningJob | EndedJob) -> str:
    """One line about a job."""
    if isinstance(job, RunningJob):
        return f"{job.job_id}  {job.job_name}  for {age(job.age_s())}  {job.run_dir}"
    return f"{job.job_id or '-'}  {job.job_name}  {_end_of(job)}  {job.run_dir}"


def _end_of(job: EndedJob) -> str:
    return job.stage + (f" after {age(job.ended_at - job.started_at)}" if job.ended_at else "")


def find_any(what: str | None) -> RunningJob | EndedJob:
    """A running or ended job, by its id, name or run directory; without a name the only running one, else the one that
    ended last.

    Raises:
        UsageError: no job matches, or several do.
    """
    running = running_jobs()
    ended = ended_jobs(job.run_dir for job in running)
    if what is None:
        return find_job(None, running) if running or not ended else max(ended, key=lambda job: job.ended_at)
    folder = os.path.abspath(what)
    if any(what in (job.job_id, job.job_name) or folder == job.run_dir for job in running):
        return find_job(what, running)
    there = read_end(Path(folder))
    matching = [there] if there else [job for job in ended if what in (job.job_id, job.job_name)]
    if matching:
        newest = max(matching, key=lambda job: (job.started_at, job.ended_at))
        _name_others([job for job in matching if job is not newest], what)
        return newest
    if os.path.isdir(folder):
        raise UsageError(_no_run(folder))
    known = ", ".join(job.job_id for job in running) or "none"
    raise UsageError(f"no job {what!r} runs here or is known to have ended (running: {known}); see `rlmesh ps --all`")


def _name_others(others: Sequence[EndedJob], what: str) -> None:
    """Print on stderr the older jobs of the same name."""
    if others:
        shown_ones = [job.run_dir for job in sorted(others, key=lambda job: -job.started_at)][:SHOWN_OTHERS]
        more = ", …" if len(others) > len(shown_ones) else ""
        say(
            f"the newest job called {what!r} is shown; {len(others)} more ended before it, which you name by their "
            f"folders: {', '.join(shown_ones)}{more}",
            err=True,
        )


def say(text: str, *, err: bool = False) -> None:
    """Print text that may hold others' words: control codes are made visible, and secrets are masked."""
    print(shown(mask_text(text), lines=True), file=sys.stderr if err else sys.stdout)


def find_running(what: str | None) -> RunningJob:
    """A running job, as `find_job` finds it.

    Raises:
        UsageError: there is none or more than one; if the job has ended, the error says so.
    """
    running = running_jobs()
    try:
        return find_job(what, running)
    except UsageError as error:
        if what is None or any(what in (job.job_id, job.job_name) for job in running):
            raise
        ended = [job for job in ended_jobs() if what in (job.job_id, job.job_name)]
        if not ended and (there := read_end(Path(os.path.abspath(what)))) is not None:
            ended = [there]
        if not ended and os.path.isdir(what):
            raise UsageError(_no_run(what)) from error
        if not ended:
            raise
        last = max(ended, key=lambda job: job.ended_at)
        raise UsageError(
            f"{what} has ended: {_end_of(last)}. `rlmesh status {what}` and `rlmesh logs --job {what}` tell more"
        ) from error


@contextmanager
def asking(job: RunningJob, timeout_s: float = ASK_TIMEOUT_S) -> Iterator[MemberHandle]:
    """A handle of a running job's master.

    Raises:
        UsageError: the key is gone, since the job has just ended.
    """
    from rlmesh.agent.protocol import MASTER
    from rlmesh.runtime.runtime import Runtime

    with Runtime.start(name="cli", key=job.key(), bind=False) as runtime:
        yield runtime.peer(MASTER, job.master_endpoint).options(timeout_s=timeout_s)


def _no_run(folder: str | Path) -> str:
    return (
        f"there is no run in {folder}. A run directory is the folder that a job writes its files into, among them "
        "job.json, metrics.jsonl and logs; `rlmesh ps --all` lists those of your jobs"
    )


def check_run(folder: Path) -> None:
    """Check that a folder is a run directory, and private.

    Raises:
        UsageError: there is no run in it, it belongs to another user, or others may write to it.
    """
    if folder.is_dir() and not has_run(folder):
        raise UsageError(_no_run(folder))
    check_own(folder)


def check_own(folder: Path) -> None:
    """Check that a run's folder is private.

    Raises:
        UsageError: the folder belongs to another user, or others may write to it.
    """
    try:
        private_files.check_folder(folder)
    except private_files.UnsafeFile as error:
        raise UsageError(f"it is not read, since somebody else may have written there: {error}") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from None


def matches(name: str, who: str | None) -> bool:
    """True if a member ``ROLE:rank`` matches ``ROLE`` or ``ROLE:rank``; None matches all."""
    return who is None or name.lower() == who.lower() or name.rpartition(":")[0].lower() == who.lower()


def checked(names: list[str], who: str | None) -> list[str]:
    """The members that match.

    Raises:
        UsageError: none does; the error names the existing ones.
    """
    chosen = [name for name in names if matches(name, who)]
    if not chosen:
        if who is None:
            raise UsageError("the job has no member yet")
        hint = f". To name a job: --job {who}" if _is_job(who) else ""
        raise UsageError(f"the job has no member {who!r}; it has {', '.join(names) or 'none yet'}{hint}")
    return chosen


def _is_job(what: str) -> bool:
    try:
        find_any(what)
    except UsageError:
        return False
    return True


def as_command(
    command: str, work: Callable[[argparse.Namespace], int]
) -> Callable[[argparse.Namespace, list[str]], int]:
    """A command's ``run``: prints errors for people, and turns them and Ctrl-C into exit codes."""

    def run(options: argparse.Namespace, rest: list[str]) -> int:
        try:
            if rest:
                raise UsageError(f"{' '.join(rest)!r} behind -- means nothing here; rlmesh {command} --help")
            return work(options)
        except RLMeshError as error:
            wrong_use = isinstance(error, UsageError)
            # A UsageError that the master raised is printed without the remark that it came from another process.
            text = error.remote_message if wrong_use and isinstance(error, RemoteError) else str(error)
            say(f"rlmesh {command}: {text}", err=True)
            if isinstance(error, JobFailed):
                return interrupt_code(error)
            return 2 if wrong_use else 1
        except KeyboardInterrupt as error:
            if str(error):  # how a job was stopped; a command that only looks is silent
                say(f"rlmesh {command}: {error}", err=True)
            return interrupt_code(error)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's last flush does not complain
            return 141

    return run


def add_job_argument(parser: Any, *, option: bool = False) -> None:
    """Add ``JOB``, or ``--job JOB`` for commands whose positional argument is another one."""
    text = "a job's id, name or run directory; not needed if there is only one job"
    if option:
        parser.add_argument("--job", metavar="JOB", help=text)
    else:
        parser.add_argument("job", metavar="JOB", nargs="?", help=text)
