"""Slurm's environment variables about a step and about the task that this process is. No I/O except ``scontrol``.

``srun rlmesh launch job.py`` runs in every task of a step. Each task becomes one node of the job, task 0 the head: so
one task per node is one agent per node, and with one task per GPU the agents of a machine form a node group.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlmesh.errors import LaunchError, UsageError
from rlmesh_launcher.hostlist import expand_counts, expand_nodes

__all__ = ["Names", "SlurmAllocation", "Task", "show_hostnames"]

SCONTROL_TIMEOUT_S = 30.0
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def show_hostnames(text: str, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> tuple[str, ...]:
    """Expand a list of nodes by ``scontrol show hostnames``.

    Raises:
        LaunchError: it failed; with its message.
    """
    command = ["scontrol", "show", "hostnames", text]
    try:
        done = run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"the list of nodes {text!r} cannot be read, nor by {' '.join(command)}: {error}") from None
    if done.returncode:
        raise LaunchError(f"the list of nodes {text!r} cannot be read, nor by scontrol: {done.stderr.strip()}")
    return tuple(done.stdout.split())


class Names:
    """Expands lists of nodes; asks ``scontrol`` for a list that it cannot read itself, at most once."""

    def __init__(self, ask: Callable[[str], tuple[str, ...]] = show_hostnames) -> None:
        self._ask = ask
        self._asked: dict[str, tuple[str, ...]] = {}

    def expand(self, text: str) -> tuple[str, ...]:
        """Expand a list of nodes.

        Raises:
            LaunchError: the text is not a list of nodes.
        """
        try:
            return expand_nodes(text)
        except UsageError as error:
            if text in self._asked:
                return self._asked[text]
            if self._asked:
                raise LaunchError(f"{error}; scontrol was asked for another list already") from None
            self._asked[text] = self._ask(text)
            return self._asked[text]


@dataclass(frozen=True, slots=True)
class SlurmAllocation:
    """The nodes of a step, or outside of a step of the whole job.

    Attributes:
        nodes: names, in Slurm's order.
        tasks: number of tasks on each node.
        cpus: the job's CPUs on each of its nodes; empty if Slurm does not say or the step has other nodes.
    """

    nodes: tuple[str, ...]
    tasks: tuple[int, ...]
    cpus: tuple[int, ...] = ()

    @classmethod
    def read(cls, env: Mapping[str, str], names: Names | None = None) -> SlurmAllocation:
        """Read the allocation from Slurm's variables.

        Raises:
            LaunchError: the environment is not Slurm's, or its lists contradict each other; shows both.
        """
        names = names or Names()
        nodes_name = next((name for name in _NODES if env.get(name)), None)
        if nodes_name is None:
            raise LaunchError(f"this is not a process of a Slurm job: none of {', '.join(_NODES)} is set")
        nodes = names.expand(env[nodes_name])
        tasks_name = next((name for name in _TASKS if env.get(name)), None)
        tasks = (1,) * len(nodes)
        if tasks_name is not None:
            tasks = _counts(env, tasks_name, nodes_name, nodes)
        cpus: tuple[int, ...] = ()
        # In a heterogeneous job the variable has the CPUs of one component.
        het = env.get("SLURM_HET_SIZE", "1") != "1"
        if (
            env.get("SLURM_JOB_CPUS_PER_NODE")
            and not het
            and env[nodes_name] == env.get("SLURM_JOB_NODELIST", env[nodes_name])
        ):
            cpus = _counts(env, "SLURM_JOB_CPUS_PER_NODE", nodes_name, nodes)
        return cls(nodes, tasks, cpus)

    def describe(self) -> str:
        """A sentence for people: ``4 tasks on 2 nodes (n1: 2, n2: 2)``."""
        shown = ", ".join(f"{node}: {count}" for node, count in list(zip(self.nodes, self.tasks, strict=True))[:8])
        more = ", …" if len(self.nodes) > 8 else ""
        return f"{sum(self.tasks)} tasks on {len(self.nodes)} nodes ({shown}{more})"


def _counts(env: Mapping[str, str], name: str, nodes_name: str, nodes: tuple[str, ...]) -> tuple[int, ...]:
    try:
        counts = expand_counts(env[name])
    except UsageError as error:
        raise LaunchError(f"{name}: {error}") from None
    if len(counts) != len(nodes):
        raise LaunchError(
            f"{nodes_name}={env[nodes_name]} are {len(nodes)} nodes, but {name}={env[name]} has {len(counts)} entries: "
            "was one of them changed by hand, or inherited from another job?"
        )
    return counts


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a step.

    Attributes:
        job, step: their numbers as Slurm writes them; ``id`` is the job's name for Slurm's commands.
        rank, size: rank of the task in the step, and number of tasks.
        node, node_name: the number of its node in the step, and Slurm's name of the node.
        local_rank: rank of the task among the tasks of its node.
        local_size: number of tasks of its node.
        restarts: how often Slurm has started the job before.
        launcher: address of the node on which ``srun`` runs, empty if unknown.
        job_name: the name given to ``sbatch``.
        array: ``12_3`` in an array, else empty.
        gpus: the node's GPUs that Slurm makes visible, in its notation; empty if the job requested none.
    """

    job: str
    step: str
    rank: int
    size: int
    node: int
    node_name: str
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    launcher: str = ""
    job_name: str = ""
    array: str = ""
    gpus: str = ""

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Task | None:
        """Read the task that this process is; None outside ``srun``.

        Raises:
            LaunchError: a variable is not a number.
        """
        step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
        if not (env.get("SLURM_JOB_ID") and step and env.get("SLURM_PROCID") and env.get("SLURM_NTASKS")):
            return None
        array = env.get("SLURM_ARRAY_JOB_ID", "")
        return cls(
            job=env["SLURM_JOB_ID"],
            step=step,
            rank=_number(env, "SLURM_PROCID"),
            size=_number(env, "SLURM_NTASKS"),
            node=_number(env, "SLURM_NODEID", 0),
            node_name=env.get("SLURMD_NODENAME", ""),
            local_rank=_number(env, "SLURM_LOCALID", 0),
            local_size=len(env.get("SLURM_GTIDS", "0").split(",")),
            restarts=_number(env, "SLURM_RESTART_COUNT", 0),
            launcher=env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
            job_name=env.get("SLURM_JOB_NAME", ""),
            array=f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '')}" if array else "",
            gpus=env.get("CUDA_VISIBLE_DEVICES", "") if env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") else "",
        )

    @property
    def id(self) -> str:
        """The only name by which ``squeue``, ``scontrol`` and ``scancel`` know exactly this job: the number of an
        array's last element is also the number of the whole array. Of a heterogeneous job the number of its leader."""
        return self.array or self.job

    @property
    def label(self) -> str:
        """A name for messages."""
        return f"task {self.rank} of Slurm job {self.id}.{self.step} on {self.node_name or f'node {self.node}'}"


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name}={text!r} is not a number: was it changed by hand?")
    return int(text)
