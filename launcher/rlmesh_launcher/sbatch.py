"""Jobs for ``sbatch``: the script is a pure value that can be printed; submitting it is a separate step."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from rlmesh.errors import LaunchError, UsageError
from rlmesh_launcher.orphan import VARIABLE

__all__ = ["CHECKPOINTED", "BatchJob", "submit"]

CHECKPOINTED = 75
"""Exit code of ``rlmesh launch`` when the job stopped at a step boundary, with a checkpoint: to be started again."""
NOTICE = "B:USR1@120"
"""Signal before the time limit: only to the script's shell, 120 s before (Slurm checks every 30 s or so)."""
SUBMIT_TIMEOUT_S = 60.0

_OF_TASKS = ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket", "gpus-per-task")

_SCRIPT = """\
#!/bin/bash
{directives}

# The key of this job's processes. It is passed on in the environment, never on a command line.
RLMESH_KEY=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n')
export RLMESH_KEY
{orphan}
{srun} {launch} &
step=$!

# Slurm signals this shell before the time limit (--signal). All ranks then stop at the same step.
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM
code=0
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
{end}
"""

_ORPHAN = """
# The first node runs this script. When that node is lost, a task on another node takes this action.
export {variable}={action}
"""

_REQUEUE = """
# {code}: stopped with a checkpoint before its time limit, or because a node was lost. A cancelled job is not running
# any more. The number of an array's last element is also the whole array's, so elements are named ARRAY_INDEX; of a
# heterogeneous job all components are listed.
job=$SLURM_JOB_ID
if [ -n "${{SLURM_ARRAY_JOB_ID:-}}" ]; then job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
if [ "$code" -eq {code} ] && [ "$(squeue -h -j "$job" -o %T | sort -u)" = RUNNING ]; then
  scontrol requeue "$job"
fi
exit "$code\""""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One job for ``sbatch``.

    Attributes:
        options: options of ``sbatch`` by their long names; None: a flag.
        launch: options for ``rlmesh launch`` inside the job.
        job: the script that submits the job to rlmesh, and its arguments.
        rlmesh: the command that runs rlmesh on a node.
    """

    options: Mapping[str, str | None]
    job: Sequence[str]
    launch: Sequence[str] = ()
    rlmesh: Sequence[str] = field(default=("rlmesh",))

    def __post_init__(self) -> None:
        if not self.job:
            raise UsageError("no script to run: rlmesh launch --slurm [options] JOB.py [-- arguments]")
        if (value := self.options.get("no-kill")) not in (None, "off"):
            raise UsageError(f"--no-kill={value}: give nothing or off")
        for name, value in self.options.items():
            if re.search(r"[\n\r\0]", value or ""):
                raise UsageError(f"--{name}: a value of sbatch stands on one line, {value!r} does not")

    @property
    def requeue(self) -> bool:
        """True if the job is started again after it was stopped before its end."""
        return "requeue" in self.options and "no-requeue" not in self.options

    @property
    def goes_on(self) -> bool:
        """True if Slurm keeps the job when it loses a node: rlmesh then starts the node's members elsewhere, or
        ends the job. False for jobs that have one node or restart nothing."""
        if "no-kill" in self.options:
            return self.options["no-kill"] != "off"
        words = [part for word in self.launch for part in word.split("=", 1)]
        never = {("--restart", "never"), ("--max-restarts", "0"), ("--max_restarts", "0")}
        return self.options.get("nodes") != "1" and not never & set(itertools.pairwise(words))

    def script(self) -> str:
        """The text that ``sbatch`` reads."""
        directives = "\n".join(f"#SBATCH {_directive(name, value)}" for name, value in self._directives().items())
        launch = [*self.rlmesh, "launch", *self.launch, self.job[0], *(["--", *self.job[1:]] if self.job[1:] else [])]
        end = _REQUEUE.format(code=CHECKPOINTED) if self.requeue else 'exit "$code"'
        action = "requeue" if self.requeue else "cancel"
        orphan = _ORPHAN.format(variable=VARIABLE, action=action) if self.goes_on else ""
        return _SCRIPT.format(
            directives=directives, orphan=orphan, srun=shlex.join(self._srun()), launch=shlex.join(launch), end=end
        )

    def _directives(self) -> dict[str, str | None]:
        """The user's options, and defaults that a job of agents needs."""
        options = dict(self.options)
        if not any(name in options for name in _OF_TASKS):
            options["ntasks-per-node"] = "1"
        defaults: dict[str, str | None] = {"job-name": PurePath(self.job[0]).stem, "signal": NOTICE}
        if self.requeue:
            defaults["open-mode"] = "append"
        if self.goes_on:
            defaults["no-kill"] = None
        return {**{name: value for name, value in defaults.items() if name not in options}, **options}

    def _srun(self) -> list[str]:
        """The ``srun`` of one step over the whole allocation. It waits for tasks that end late, since rlmesh ends them
        together, and does not end when a node is lost, if the job goes on."""
        words = ["srun", "--kill-on-bad-exit=0", "--wait=0"]
        if (cpus := self.options.get("cpus-per-task")) is not None:
            words.append(f"--cpus-per-task={cpus}")  # since 22.05 srun does not take it from the allocation
        if self.goes_on:
            words.append("--no-kill")
        return words


def _directive(name: str, value: str | None) -> str:
    """Format one option for ``sbatch``, which reads quotes in a script as a shell does."""
    if value is None:
        return f"--{name}"
    if re.fullmatch(r"[\w@%+=:,./\[\]*&|!~^-]+", value):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def submit(script: str, run: Run = subprocess.run) -> str:
    """Submit a script to ``sbatch``; return the job number.

    Raises:
        LaunchError: there is no ``sbatch`` here, or it refused; with its message.
    """
    # The variables of a surrounding allocation would leak into the new job, whose srun reads SLURM_NTASKS and the like.
    inside = "SLURM_JOB_ID" in os.environ
    env = {
        name: value
        for name, value in os.environ.items()
        if not (inside and name.startswith("SLURM_") and name not in ("SLURM_CONF", "SLURM_CLUSTERS"))
    }
    try:
        done = run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, env=env, timeout=SUBMIT_TIMEOUT_S
        )
    except FileNotFoundError:
        raise LaunchError(
            "there is no sbatch on PATH: run this on a login node of the cluster, or print the script with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"sbatch gave no answer within {SUBMIT_TIMEOUT_S:g} s; is the controller up? scontrol ping"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LaunchError(f"sbatch refused the job: {said}\nPrint the script that it was given with --dry-run")
    return done.stdout.strip().partition(";")[0]
