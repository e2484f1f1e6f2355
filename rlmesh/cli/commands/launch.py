"""``rlmesh launch JOB.py``: runs a script that submits a job, in this process, as ``python JOB.py`` would.

The command adds options for the jobs that the script submits, and readable errors.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh.cli.launching import observe_options
from rlmesh.cli.launching.hosts import add_host_flags, launch_on_hosts
from rlmesh.cli.launching.signals import heeding_signals
from rlmesh.cli.launching.slurm import FOLDER_VARIABLE, StepPlace, add_slurm_flags, task_of_slurm
from rlmesh.cli.launching.torchrun_options import NodeFlags, add_node_flags, read_node_flags
from rlmesh.cli.quantities import seconds
from rlmesh.driver.failure_report import failure_lines
from rlmesh.driver.options import Cluster, LaunchOptions, ambient
from rlmesh.driver.outcome import interrupt_code
from rlmesh.errors import JobFailed, JobStopped, RLMeshError, UsageError
from rlmesh.job.entry_points.program import started_as
from rlmesh.job.restarts import SCOPES
from rlmesh.observe.views.safe_text import shown
from rlmesh.runtime.connections.security import KEY_TEXT_VARIABLE, KEY_VARIABLE, find_key, parse_key
from rlmesh.runtime.process.forked import end_child

if TYPE_CHECKING:
    from rlmesh.rendezvous.server import RendezvousServer
    from rlmesh_launcher.slurm import Task

DESCRIPTION = (
    "Run a script that submits a job. Words after the script are its arguments. With --nnodes, run the command on each "
    "node: the script runs on node 0, the other nodes take part with an agent each."
)
VIEWS = ("auto", "live", "plain", "none")
RESUMABLE = 75
"""Exit code of a job that got notice and stopped where it can be resumed: the "try again" of sysexits.h."""


def add_to(commands: Any) -> None:
    """Add the command to ``rlmesh``'s subparsers."""
    parser = commands.add_parser(
        "launch",
        help="run a script that submits a job",
        description=DESCRIPTION,
        usage="rlmesh launch [options] JOB.py [script arguments]",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("job", metavar="JOB.py", nargs="?", default="", help="the script; it calls submit() on a job")
    parser.add_argument(
        "--view",
        choices=VIEWS,
        help="how progress is shown: live on a terminal, plain lines elsewhere (auto, the default), or not at all",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of logs, metrics and report")
    parser.add_argument(
        "--restart",
        choices=SCOPES,
        help="what to restart when a member dies, whatever the job says (never: the job fails)",
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"the job's key, made by rlmesh keygen (default: the file that {KEY_VARIABLE} names, else a new key)",
    )
    observe_options.add_options(parser)
    parser.add_argument("--key-stdin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="print how nodes would be started; start nothing")
    add_node_flags(parser)
    add_host_flags(parser)
    add_slurm_flags(parser)
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL when the job is stopped (default 2.5)",
    )
    parser.add_argument(
        "--stop-within",
        type=seconds,
        metavar="S",
        help="seconds that all ranks have, after notice, to reach the step at which they stop together (default 600)",
    )


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the script, or take part in a job as one of its nodes; return the exit code."""
    try:
        flags = read_node_flags(options, os.environ)
        for note in flags.notes:
            print(f"rlmesh launch: {note}", file=sys.stderr)
        if options.dry_run and options.hosts is None:
            raise UsageError(
                "--dry-run prints how nodes would be started, so it goes with --hosts or --slurm; `rlmesh plan JOB.py` "
                "prints where a job's members would run"
            )
        if options.sbatch:  # with --slurm the command line is read by `submit_words`
            raise UsageError("--sbatch passes options to sbatch, so it goes with --slurm")
        if options.hosts is not None:
            _check_script(options.job, module=True)
            return launch_on_hosts(options, arguments, _key_of(options, needed=False))
        if (task := task_of_slurm(options)) is not None:
            return _run_task(task, options, flags, arguments)
        joins = flags.node_rank is not None and flags.node_rank > 0
        if not joins:
            _check_script(options.job, flags.module)
        key = _key_of(options, needed=flags.most > 1)
        launch = _options_of(options, flags, key)
        if flags.most == 1:
            with ambient(launch) as block, heeding_signals(block):
                return run_script(options.job, arguments, module=flags.module, jobs=block.jobs)
        assert key is not None
        lifeline = 0 if options.key_stdin else None
        if lifeline is not None and not joins:
            follow_input(lifeline)
        return _run_node(flags, key, lifeline, launch, lambda: _script_code(options, flags, arguments))
    except UsageError as error:
        print(shown(f"rlmesh launch: {error}", lines=True), file=sys.stderr)
        return 2
    except RLMeshError as error:
        print(shown(f"rlmesh launch: {type(error).__name__} ({error.code}): {error}", lines=True), file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"rlmesh launch: {str(error) or 'stopped'}", file=sys.stderr)
        return interrupt_code(error)


def _run_task(task: Task, options: argparse.Namespace, flags: NodeFlags, arguments: list[str]) -> int:
    """Run as a task of a Slurm step."""
    if task.rank == 0:
        _check_script(options.job, flags.module)
    key = _key_of(options, needed=False)
    folder = Path(os.environ.get(FOLDER_VARIABLE) or ".rlmesh")
    place = StepPlace(task, folder, key, flags.local_addr, flags.join_s)
    launch = place.options(_options_of(options, flags, key), options.job)

    def script(head: RendezvousServer | None) -> int:
        with ambient(replace(launch, head=head)) as block, heeding_signals(block):
            return run_script(options.job, arguments, module=flags.module, node_lost=RESUMABLE)

    return place.run(script)


def _script_code(options: argparse.Namespace, flags: NodeFlags, arguments: list[str]) -> int:
    _check_script(options.job, flags.module)
    return run_script(options.job, arguments, module=flags.module)


def _check_script(job: str, module: bool) -> None:
    if not job:
        raise UsageError("name the script that submits the job: rlmesh launch [options] JOB.py")
    if not module and not Path(job).is_file():
        raise UsageError(f"there is no script {job} (in {os.getcwd()})")


def _key_of(options: argparse.Namespace, *, needed: bool) -> bytes | None:
    """The job's key, if given. It is removed from the environment, which members inherit.

    Raises:
        UsageError: it is needed and not given, or not valid.
    """
    if options.key_stdin:
        return parse_key(_first_line(0), "standard input")
    if not (needed or options.key_file or os.environ.get(KEY_VARIABLE) or os.environ.get(KEY_TEXT_VARIABLE)):
        return None
    try:
        return find_key(options.key_file)
    finally:
        os.environ.pop(KEY_TEXT_VARIABLE, None)


def _first_line(fd: int) -> bytes:
    """Read one line and nothing after it: later lines are for other readers."""
    line = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return line.strip()


def _options_of(options: argparse.Namespace, flags: NodeFlags, key: bytes | None) -> LaunchOptions:
    cluster = Cluster((os.uname().nodename,), flags.slots) if flags.slots is not None else None
    grace_s = options.grace if options.grace is not None else flags.grace_s
    return LaunchOptions(
        view=options.view, restart=options.restart, run_dir=options.run_dir, run_root=flags.log_root, key=key,
        cluster=cluster, grace_s=grace_s, stop_within_s=options.stop_within,
        observe=observe_options.options_of(options), max_restarts=flags.max_restarts,
        trackers=tuple(options.tracker) or None,
    )  # fmt: skip


def _run_node(
    flags: NodeFlags, key: bytes, lifeline: int | None, launch: LaunchOptions, script: Callable[[], int]
) -> int:
    from rlmesh_launcher.local import NodePlace, run_node

    place = NodePlace(
        flags.least, flags.most, flags.host, flags.port, key, flags.node_rank, flags.join_s, flags.last_call_s,
        host_here=flags.local_addr, lifeline=lifeline,
    )  # fmt: skip

    def run_head(head: RendezvousServer) -> int:
        head.on_full = lambda text: print(f"rlmesh: {text}", file=sys.stderr, flush=True)
        with ambient(replace(launch, head=head)) as block, heeding_signals(block):
            return script()

    def announce(endpoint: str) -> None:
        print(f"rlmesh: node 0 of {flags.most} listens at {endpoint}", file=sys.stderr, flush=True)

    return run_node(place, run_head, announce)


def follow_input(fd: int) -> None:
    """Let the process that started this one by ssh end it: a line ``interrupt`` acts as Ctrl-C, and the end of the
    input (closed by that process, or a lost connection) as Ctrl-C twice."""

    def follow() -> None:
        half = b""
        while data := os.read(fd, 4096):
            *lines, half = (half + data).split(b"\n")
            for line in lines:
                if line == b"interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # two signals at the same moment would be one

    threading.Thread(target=follow, name="rlmesh-input", daemon=True).start()


def run_script(
    script: str, arguments: list[str], *, module: bool = False, node_lost: int = 1, jobs: Sequence[object] | None = None
) -> int:
    """Run a script or module as ``__main__`` and return an exit code; errors are printed to stderr.

    Args:
        node_lost: the exit code of a job that failed because a node was lost.
        jobs: the jobs that the script submits. If given and empty at the script's end, that is printed.
    """
    argv, path = sys.argv, list(sys.path)
    script = script if module else os.path.abspath(script)  # it may change the directory before it submits
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    try:
        _run_as_main(script, module)
    except SystemExit as error:
        return _code_of(error)
    except KeyboardInterrupt as error:
        print(f"rlmesh: {str(error) or 'stopped'}", file=sys.stderr)
        return interrupt_code(error)
    except JobStopped as error:
        print(shown(f"rlmesh: {error}", lines=True), file=sys.stderr)
        return RESUMABLE
    except JobFailed as error:
        print(shown(failure_text(error), lines=True), file=sys.stderr)
        return node_lost if error.node_lost else interrupt_code(error)
    except RLMeshError as error:
        print(shown(f"rlmesh: {type(error).__name__} ({error.code}): {error}", lines=True), file=sys.stderr)
        return 1
    except Exception as error:
        _print_script_error(error, script)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    if jobs is not None and not jobs:
        print(f"rlmesh launch: {script} has ended and submitted no job", file=sys.stderr)
    return 0


def _run_as_main(script: str, module: bool) -> None:
    own = os.getpid()
    try:
        with started_as(sys.argv):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        if os.getpid() != own:  # a child that the script forked: the rest is for its parent
            end_child(error)
        raise
    if os.getpid() != own:
        end_child(None)


def failure_text(error: JobFailed) -> str:
    """A failed job for people: the first cause, then its consequences, then where to look."""
    return "\n".join(["", *failure_lines(error)])


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _print_script_error(error: Exception, script: str) -> None:
    """Print the script's own traceback, without the frames that ran it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # a syntax error in the script names its place itself
        trace = error.__traceback__
    traceback.print_exception(type(error), error, trace, file=sys.stderr)
