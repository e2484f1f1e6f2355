"""``rlmesh launch`` under Slurm: as a task of a step, or, with ``--slurm``, submitting a script to ``sbatch``."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh.agent.processes.ownership import SHARED_SIGNALS
from rlmesh.driver.options import LaunchOptions
from rlmesh.errors import LaunchError, RLMeshError, UsageError
from rlmesh.job.masking import mask_text
from rlmesh.runtime.transport.inet import local_route_to

if TYPE_CHECKING:
    from rlmesh.rendezvous.server import RendezvousServer
    from rlmesh_launcher.local import NodePlace
    from rlmesh_launcher.slurm import Task

__all__ = ["FOLDER_VARIABLE", "StepPlace", "add_slurm_flags", "asks_for_sbatch", "submit_words", "task_of_slurm"]

FLAG = "--slurm"
FOLDER_VARIABLE = "RLMESH_RENDEZVOUS_DIR"
"""Variable that names the folder, visible to all nodes, for the endpoint of a step's head (default: ``.rlmesh``)."""


def add_slurm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the option for the help; `submit_words` reads its words."""
    group = parser.add_argument_group("Slurm")
    group.add_argument(
        FLAG,
        action="store_true",
        help="submit the job to sbatch: rlmesh launch --slurm [any option of sbatch] JOB.py … (--dry-run prints the "
        "script). Inside a job, `srun rlmesh launch JOB.py` needs no option",
    )
    group.add_argument(
        "--sbatch", action="append", metavar="OPTION",
        help="pass an option to sbatch unchanged, such as one that rlmesh does not know: --sbatch=--name=value",
    )  # fmt: skip


# Submitting.


def asks_for_sbatch(words: Sequence[str], launch: argparse.ArgumentParser) -> bool:
    """True if ``--slurm`` stands before the script."""
    if FLAG not in words:
        return False
    from rlmesh_launcher.sbatch_options import first_words

    return FLAG in first_words(words, _own_options(launch))


def _own_options(launch: argparse.ArgumentParser) -> dict[str, bool]:
    """The options of ``rlmesh launch``, each with True if it takes a value."""
    return {name: action.nargs != 0 for action in launch._actions for name in action.option_strings}


def submit_words(words: Sequence[str], launch: argparse.ArgumentParser) -> int:
    """Run ``rlmesh launch --slurm`` with these words: print or submit the script; return the exit code."""
    from rlmesh_launcher.sbatch import BatchJob, submit
    from rlmesh_launcher.sbatch_options import split_words

    try:
        split = split_words(words, _own_options(launch))
        options = [word for word in split.launch if word not in (FLAG, "--dry-run")]
        _check_options(launch.parse_args([*options, *split.job[:1]]))
        _check_script(split.job, "--module" in options or "-m" in options, split.sbatch.get("chdir") or "")
        batch = BatchJob(split.sbatch, split.job, options, _own_command())
        if "--dry-run" in split.launch:
            print(mask_text(batch.script()), end="")
            return 0
        job = submit(batch.script())
    except UsageError as error:
        print(f"rlmesh launch: {error}", file=sys.stderr)
        return 2
    except RLMeshError as error:
        print(f"rlmesh launch: {type(error).__name__} ({error.code}): {error}", file=sys.stderr)
        return 1
    print(f"Slurm job {job}")
    print(f"  state:   squeue --job={job}")
    print(f"  output:  tail -F {_output_of(split.sbatch, job, split.job[0])}")
    print(f"  stop it with a checkpoint: scancel --batch --signal=USR1 {job}; at once: scancel {job}")
    if "array" in split.sbatch:
        print(f"  one element: {job}_INDEX in place of {job}")
    return 0


NODES_BY_SLURM = {
    "nnodes": "--nodes",
    "node_rank": "",
    "rdzv_endpoint": "",
    "master_addr": "",
    "master_port": "",
    "standalone": "--nodes=1",
    "hosts": "--nodelist",
}
"""Options that name the nodes, which Slurm does instead, and the equivalent option of ``sbatch``."""


def _check_options(options: argparse.Namespace) -> None:
    wrong = [name for name in NODES_BY_SLURM if getattr(options, name, None)]
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        instead = ", ".join(filter(None, (NODES_BY_SLURM[name] for name in wrong)))
        raise UsageError(
            f"nodes and their ranks come from Slurm: leave out {names}"
            + (f" (sbatch has {instead})" if instead else "")
        )


def _check_script(job: Sequence[str], module: bool, folder: str) -> None:
    if job[:1] == [":"]:
        raise UsageError(
            "components of a heterogeneous job are not submitted by --slurm: write a batch script of your own with "
            "`#SBATCH hetjob` between them, and in it `srun --het-group=0,1 rlmesh launch JOB.py` (docs/slurm.md)"
        )
    if job and not module and not Path(folder, job[0]).is_file():
        raise UsageError(f"there is no script {job[0]} (in {os.path.abspath(folder)})")


def _own_command() -> tuple[str, ...]:
    """The command by which a node runs this rlmesh: its name if PATH finds this one, else its path."""
    program = Path(sys.argv[0])
    if program.name != "rlmesh":
        return (sys.executable, "-m", "rlmesh.cli.main")
    found = shutil.which("rlmesh")
    if found is not None and Path(found).resolve() == program.resolve():
        return ("rlmesh",)
    return (str(program.absolute()),)


def _output_of(options: Any, job: str, script: str) -> str:
    """The file to which ``sbatch`` writes; of an array, all files."""
    name = options.get("output") or ("slurm-%A_%a.out" if "array" in options else "slurm-%j.out")
    known = {"j": job, "J": job, "A": job, "a": "*", "x": options.get("job-name") or Path(script).stem}
    text = re.sub(r"%0?\d*([jJAax])", lambda found: known[found[1]], str(name))
    return os.path.join(options.get("chdir") or "", text)


# Running as a task.


def task_of_slurm(options: argparse.Namespace) -> Task | None:
    """The task of a step that this process is; None if it is none, or the options name the nodes.

    Raises:
        UsageError: the process runs in a job of several nodes, but only on one of them.
    """
    from rlmesh_launcher.slurm import Task

    env = os.environ
    if not env.get("SLURM_JOB_ID") or options.nnodes or options.standalone or options.hosts or env.get("PET_NNODES"):
        return None
    task = Task.read(env)
    if task is None and env.get("SLURM_JOB_NUM_NODES", "1") != "1":
        # salloc's shell has no SLURM_PROCID, and may run on a machine outside the job.
        what = "the script" if env.get("SLURM_PROCID") else "a shell"
        raise UsageError(
            f"this is {what} of Slurm job {env['SLURM_JOB_ID']}, which has {env['SLURM_JOB_NUM_NODES']} nodes, and "
            "rlmesh would run on this machine only: start it on all of them by `srun rlmesh launch …` (or pass "
            "--standalone to use this one)"
        )
    return task


@dataclass(frozen=True)
class StepPlace:
    """One task of a step, as a node of the job.

    Args:
        task: the task.
        folder: the folder for the head's endpoint, visible to all nodes.
        key: the job's key, if all tasks have it already.
        local_addr: the address of this node for others, if the detected one is wrong.
        join_s: seconds for the tasks to come together.
    """

    task: Task
    folder: Path
    key: bytes | None
    local_addr: str = ""
    join_s: float = 600.0

    def options(self, launch: LaunchOptions, script: str) -> LaunchOptions:
        """The options of the script's jobs, with a run directory that the start after a requeue finds again."""
        task = self.task
        name = f"{Path(script).stem or 'job'}-{task.id}" + (f".{task.step}" if task.step != "0" else "")
        root = launch.run_root or Path("runs")
        return replace(launch, run_dir=launch.run_dir or root / name, restarts=task.restarts)

    def run(self, run_script: Callable[[RendezvousServer | None], int]) -> int:
        """Run the task until the job is over; return the exit code.

        Raises:
            LaunchError: the tasks did not come together.
        """
        # slurmstepd signals every process of a task, in whatever session.
        os.environ[SHARED_SIGNALS] = "1"
        if self.task.size == 1:
            return run_script(None)
        return self._be_head(run_script) if self.task.rank == 0 else self._join()

    def _rendezvous(self) -> Any:
        from rlmesh_launcher.slurm_rendezvous import MUNGE_SOCKET_VARIABLE, Munge, SlurmRendezvous

        task = self.task
        munge = Munge(os.environ.get(MUNGE_SOCKET_VARIABLE, ""))
        return SlurmRendezvous(self.folder, f"slurm-{task.job}.{task.step}-{task.restarts}", self.key, munge)

    def _be_head(self, run_script: Callable[[RendezvousServer | None], int]) -> int:
        from rlmesh_launcher.local import run_node
        from rlmesh_launcher.slurm import SlurmAllocation

        rendezvous = self._rendezvous()
        heads: list[RendezvousServer] = []

        def script(head: RendezvousServer) -> int:
            heads.append(head)
            return run_script(head)

        def announce(endpoint: str) -> None:
            rendezvous.publish(host, int(endpoint.rpartition(":")[2]), key)
            print(f"rlmesh: Slurm job {self.task.id}: {allocation.describe()}", file=sys.stderr, flush=True)

        try:
            key = rendezvous.make_key()
            host = self._own_address()
            allocation = SlurmAllocation.read(os.environ)
            if sum(allocation.tasks) != self.task.size:
                raise LaunchError(
                    f"{self.task.label}: the step has {self.task.size} tasks, not {allocation.describe()}"
                )
            code = run_node(self._place(host, 0, key), script, announce)
            if all(head.is_full for head in heads):
                rendezvous.forget()
            else:
                rendezvous.give_up(f"its script ended with exit code {code} before all tasks were there", code)
            return code
        except RLMeshError as error:
            rendezvous.give_up(str(error))
            raise

    def _join(self) -> int:
        from rlmesh_launcher.local import run_node
        from rlmesh_launcher.orphan import look_after
        from rlmesh_launcher.slurm_rendezvous import HeadGone

        try:
            found = self._rendezvous().find(self.join_s)
        except HeadGone as gone:
            if gone.exit_code:
                print(f"rlmesh: {self.task.label}: {gone}", file=sys.stderr, flush=True)
            return gone.exit_code

        def no_script(head: RendezvousServer) -> int:
            raise LaunchError(f"{self.task.label} is not the head")

        try:
            return run_node(self._place(found.host, found.port, found.key), no_script)
        except LaunchError:
            look_after(self.task)
            raise

    def _place(self, host: str, port: int, key: bytes) -> NodePlace:
        from rlmesh_launcher.local import NodePlace

        task = self.task
        shared = task.local_size > 1
        return NodePlace(
            task.size, task.size, host, port, key, task.rank, self.join_s, host_here=self.local_addr,
            name=f"{task.node_name}.{task.local_rank}" if shared else task.node_name,
            group=task.node_name if shared else "",
        )  # fmt: skip

    def _own_address(self) -> str:
        """The address at which the other tasks reach this one: in the network by which Slurm reaches it."""
        task = self.task
        if self.local_addr:
            return self.local_addr
        if task.local_size == task.size:
            return "127.0.0.1"
        try:
            return local_route_to(task.launcher)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{task.label}: no address of this node was found ({error}): pass --local-addr ADDRESS"
            ) from None
