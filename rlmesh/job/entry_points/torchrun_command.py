"""torchrun's options and commands. No I/O."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rlmesh.job.nearest_name import did_you_mean

__all__ = ["TORCHRUN_OPTIONS", "TorchrunCommand", "TorchrunOption", "parse_torchrun"]


@dataclass(frozen=True, slots=True)
class TorchrunOption:
    """An option of torchrun, and its meaning for ``rlmesh launch``.

    Attributes:
        name: its name with dashes; underscores are read too.
        value: the name of its value in the help; empty for a flag.
        help: its help; empty if the help does not show it.
        short: its short form, such as ``-m``.
        ignored: why it changes nothing; empty if it has a meaning.
        refused: why it is refused, if ignoring it would do something else than requested.
    """

    name: str
    value: str = ""
    help: str = ""
    short: str = ""
    ignored: str = ""
    refused: str = ""

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


def _ignored(name: str, why: str, short: str = "") -> TorchrunOption:
    return TorchrunOption(name, "VALUE", short=short, ignored=why)


TORCHRUN_OPTIONS = (
    TorchrunOption("nnodes", "N[:MAX]", "number of nodes, the same on each (default 1)"),
    TorchrunOption("node-rank", "R", "0 runs the script, the other nodes run an agent each"),
    TorchrunOption("rdzv-endpoint", "HOST[:PORT]", "address of node 0 (default port 29400)"),
    TorchrunOption("master-addr", "HOST", "the same, in two options"),
    TorchrunOption("master-port", "PORT"),
    TorchrunOption("local-addr", "ADDRESS", "address of this node for the others, if the detected one is wrong"),
    TorchrunOption("rdzv-backend", "NAME"),
    TorchrunOption("rdzv-id", "ID"),
    TorchrunOption("rdzv-conf", "K=V,…", "join_timeout=600,last_call_timeout=30 (seconds)"),
    TorchrunOption("standalone", help="use this machine alone, whatever PET_* says"),
    TorchrunOption("nproc-per-node", "N", "device slots of each node for a job on CPUs"),
    TorchrunOption("log-dir", "DIR", "folder for run directories (default runs)"),
    TorchrunOption("module", help="JOB.py is the name of a module", short="-m"),
    TorchrunOption("run-path"),
    TorchrunOption("max-restarts", "N", "restarts of members in all, for roles for which the job sets no number"),
    TorchrunOption("shutdown-timeout", "S"),
    _ignored("monitor-interval", "the end of a process is noticed at once; nothing is polled"),
    _ignored("start-method", "workers are forked from a process that has imported what they need, or started by exec"),
    _ignored("redirects", "each member's output goes to logs/ROLE-rank.log in the run directory, always", "-r"),
    _ignored("tee", "each member's output goes to its log file and to the console, always", "-t"),
    _ignored("local-ranks-filter", "all members are shown, each line with its name; `rlmesh logs ROLE:rank` shows one"),
    _ignored("log-line-prefix-template", "each line on the console begins with the member's name"),
    _ignored("role", "roles are named in the job"),
    _ignored("event-log-handler", "events are in the run directory"),
    _ignored("logs-specs", "logs are in the run directory"),
    _ignored("duplicate-stdout-filters", "logs are in the run directory"),
    _ignored("duplicate-stderr-filters", "logs are in the run directory"),
    _ignored("numa-binding", "members are bound next to their devices by the placement"),
    _ignored("signals-to-handle", "SIGINT, SIGTERM and SIGHUP end the job; see docs/launching.md"),
    TorchrunOption("no-python", refused="the script submits a job from this process, so it must be Python"),
    TorchrunOption(
        "virtual-local-rank",
        refused="LOCAL_RANK is the member's rank on its node; devices are chosen by the placement",
    ),
)
"""All options of torchrun. `parse_torchrun` reads them in a command and drops those about things that rlmesh does by
itself: rendezvous, addresses, logs. ``rlmesh launch`` has the same options."""

_VALUED = {option.key for option in TORCHRUN_OPTIONS if option.value}
_FLAGS = {option.key for option in TORCHRUN_OPTIONS if not option.value}
_DLROVERS_CHECKS = {"node_check", "network_check", "comm_perf_test"}
"""Flags of dlrover-run that request a check of the nodes, which rlmesh makes by itself."""
_DLROVERS_VALUED = {"precheck", "node_unit", "accelerator", "training_port", "membind_policy", "ucp_device_type"}
_DLROVERS_FLAGS = _DLROVERS_CHECKS | {
    "auto_config", "auto_tunning", "exclude_straggler", "numa_affinity", "save_at_breakpoint",
}  # fmt: skip
"""Flags of dlrover-run. Only ``auto_config`` changes the job: the number of processes is the machine's."""

_SHORT = {option.short[1:]: option.key for option in TORCHRUN_OPTIONS if option.short}
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "dlrover-run")


@dataclass(frozen=True, slots=True)
class TorchrunCommand:
    """A torchrun command.

    ``nproc_per_node`` is ``None`` if the command leaves it to the machine (``auto``, ``gpu``, ``cpu``).
    ``entry`` is the script and its arguments, or ``-m`` and a module. ``node_check`` is True if the nodes must be
    checked first; ``None`` if the command does not say.
    """

    nnodes: int
    nproc_per_node: int | None
    max_restarts: int
    entry: str
    node_check: bool | None = None


def parse_torchrun(command: str) -> TorchrunCommand:
    """Parse ``torchrun --nnodes=2 --nproc_per_node=4 train.py --lr 1`` (or ``python -m torch.distributed.run …``).

    Raises:
        ValueError: it is not such a command, or requests something impossible; the message says what.
    """
    if not isinstance(command, str):  # shlex would read standard input for None
        raise ValueError(f"{command!r} is not a torchrun command: give text")
    words = _after_launcher(shlex.split(command), command)
    dlrover = "dlrover-run" in shlex.split(command)[0]
    options, rest = _options(words, dlrover=dlrover)
    if "no_python" in options or "run_path" in options:
        raise ValueError("--no-python and --run-path have no counterpart: name a Python script or a module")
    if not rest:
        raise ValueError(f"{command!r} names no script to run")
    entry = shlex.join(["-m", *rest] if "module" in options else rest)
    return TorchrunCommand(
        nnodes=_nodes(options.get("nnodes", "1"), options.get("node_unit", "1")),
        nproc_per_node=_procs(options.get("nproc_per_node", "auto" if "auto_config" in options else "1")),
        max_restarts=_number("max_restarts", options.get("max_restarts", "0"), 0),
        entry=entry,
        node_check=_node_check(options),
    )


def _after_launcher(words: list[str], command: str) -> list[str]:
    if words and words[0].rpartition("/")[2] in _LAUNCHERS:
        return words[1:]
    if len(words) > 2 and "python" in words[0] and words[1] == "-m" and words[2] in _LAUNCHERS:
        return words[3:]
    raise ValueError(
        f"{command!r} is not a torchrun command: it must start with torchrun or python -m torch.distributed.run"
    )


def _options(words: list[str], *, dlrover: bool) -> tuple[dict[str, str], list[str]]:
    """Return the options before the script, by name with underscores, and the script with its arguments."""
    flags = _FLAGS | _DLROVERS_FLAGS if dlrover else _FLAGS
    valued = _VALUED | _DLROVERS_VALUED if dlrover else _VALUED
    options: dict[str, str] = {}
    position = 0
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        position += 1
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = _SHORT.get(name, name) if not word.startswith("--") else name.replace("-", "_")
        if name in flags:
            options[name] = ""
        elif name not in valued:
            launcher = "dlrover-run" if dlrover else "torchrun"
            raise ValueError(f"{launcher} has no option {word!r}.{did_you_mean(name, valued | flags)}")
        elif equals:
            options[name] = value
        elif position < len(words):
            options[name] = words[position]
            position += 1
        else:
            raise ValueError(f"option {word!r} has no value")
    return options, words[position:]


def _nodes(text: str, unit: str) -> int:
    parts = text.split(":")
    if len(parts) > 2:
        raise ValueError(f"--nnodes={text}: must be a whole number of at least 1")
    if parts[0] != parts[-1]:
        raise ValueError(f"--nnodes={text}: a range of nodes is not supported; give one number")
    nodes = _number("nnodes", parts[0], 1)
    if nodes % _number("node_unit", unit, 1):
        raise ValueError(f"--nnodes={text}: must be a multiple of --node_unit={unit}")
    return nodes


def _node_check(options: dict[str, str]) -> bool | None:
    if options.get("accelerator", "nvidia.com/gpu") != "nvidia.com/gpu":
        raise ValueError(f"--accelerator={options['accelerator']}: rlmesh knows GPUs of NVIDIA and CPUs")
    if "precheck" in options and options["precheck"] not in ("0", "1", "2"):
        raise ValueError(f"--precheck={options['precheck']}: must be 0, 1 or 2")
    if _DLROVERS_CHECKS & options.keys():
        return True
    return options["precheck"] != "0" if "precheck" in options else None


def _procs(text: str) -> int | None:
    return None if text in ("auto", "gpu", "cpu", "xpu") else _number("nproc_per_node", text, 1)


def _number(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"--{name}={text}: must be a whole number of at least {least}")
    return int(text)
