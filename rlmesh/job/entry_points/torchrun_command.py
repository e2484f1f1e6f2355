"""Parser of torchrun commands. No I/O."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rlmesh.job.nearest_name import did_you_mean

__all__ = ["TorchrunCommand", "parse_torchrun"]

_OURS = frozenset(
    {
        "local_addr",
        "log_dir",
        "log_line_prefix_template",
        "local_ranks_filter",
        "logs_specs",
        "master_addr",
        "master_port",
        "monitor_interval",
        "node_rank",
        "numa_binding",
        "rdzv_backend",
        "rdzv_conf",
        "rdzv_endpoint",
        "rdzv_id",
        "redirects",
        "role",
        "signals_to_handle",
        "start_method",
        "tee",
        "event_log_handler",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "virtual_local_rank",
        "shutdown_timeout",
    }
)
"""Options that rlmesh handles itself (rendezvous, addresses, logs). They are parsed and ignored."""

_VALUED = {"nnodes", "nproc_per_node", "max_restarts"} | (_OURS - {"virtual_local_rank"})
_FLAGS = {"standalone", "module", "no_python", "run_path", "virtual_local_rank"}
_DLROVERS_CHECKS = {"node_check", "network_check", "comm_perf_test"}
"""Flags of dlrover-run that ask for a check of the nodes, which rlmesh always makes."""
_DLROVERS_VALUED = {"precheck", "node_unit", "accelerator", "training_port", "membind_policy", "ucp_device_type"}
_DLROVERS_FLAGS = _DLROVERS_CHECKS | {
    "auto_config", "auto_tunning", "exclude_straggler", "numa_affinity", "save_at_breakpoint",
}  # fmt: skip
"""Of these, only ``auto_config`` concerns the job: the machine determines the number of processes."""

_SHORT = {"m": "module", "r": "redirects", "t": "tee"}
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "dlrover-run")


@dataclass(frozen=True, slots=True)
class TorchrunCommand:
    """The parsed content of a torchrun command.

    ``nproc_per_node`` is ``None`` if the machine determines it (``auto``, ``gpu``, ``cpu``). ``entry`` is the script
    and its
    arguments, or ``-m`` and a module. ``node_check``: check the nodes first; ``None`` if the command does not say.
    """

    nnodes: int
    nproc_per_node: int | None
    max_restarts: int
    entry: str
    node_check: bool | None = None


def parse_torchrun(command: str) -> TorchrunCommand:
    """Parse ``torchrun --nnodes=2 --nproc_per_node=4 train.py --lr 1`` (or ``python -m torch.distributed.run …``).

    Raises:
        ValueError: it is not such a command, or asks for something impossible; the message says what.
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
