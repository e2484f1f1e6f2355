"""torchrun's options and environment (``PET_*``) for ``rlmesh launch``, and their meaning here. No I/O.

Options without a meaning are accepted with a note that says why, or refused if ignoring them would do something else
than requested. docs/launching.md has the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.job.entry_points.torchrun_command import TORCHRUN_OPTIONS
from rlmesh.rendezvous.state import DEFAULT_PORT
from rlmesh.runtime.transport.inet import parse_endpoint

__all__ = ["NodeFlags", "add_node_flags", "read_node_flags"]

MASTER_PORT = 29500
"""Port of ``--master-addr`` if none is given, as in torchrun."""
JOIN_S, LAST_CALL_S = 600.0, 30.0

IGNORED = {option.name: option.ignored for option in TORCHRUN_OPTIONS if option.ignored}
REFUSED = {option.name: option.refused for option in TORCHRUN_OPTIONS if option.refused}


@dataclass(frozen=True, slots=True)
class NodeFlags:
    """The parsed options.

    Attributes:
        least, most: number of nodes; 1 and 1 without other machines.
        node_rank: None: assigned when the nodes come together.
        host, port: of the head; empty on one machine.
        slots: virtual accelerators of each node, for a job of device type CPU.
        log_root: the folder for run directories.
        module: the script is the name of a module.
        max_restarts: restarts of members in all, unless the job sets another number.
        grace_s: seconds between SIGTERM and SIGKILL when the job is stopped.
        notes: sentences about options that change nothing.
    """

    least: int = 1
    most: int = 1
    node_rank: int | None = None
    host: str = ""
    port: int = DEFAULT_PORT
    local_addr: str = ""
    join_s: float = JOIN_S
    last_call_s: float = LAST_CALL_S
    slots: int | None = None
    log_root: Path | None = None
    module: bool = False
    max_restarts: int | None = None
    grace_s: float | None = None
    notes: tuple[str, ...] = ()


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options; options that change nothing are not in the help."""
    group = parser.add_argument_group("several nodes, as torchrun")
    for option in TORCHRUN_OPTIONS:
        settings: dict[str, Any] = {"help": option.help or argparse.SUPPRESS}
        settings |= {"metavar": option.value} if option.value else {"action": "store_true", "default": None}
        group.add_argument(*filter(None, [option.short, f"--{option.name}"]), **settings)
        if "-" in option.name:  # torchrun takes both spellings
            hidden = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            group.add_argument(f"--{option.key}", **{**settings, **hidden})


def read_node_flags(options: argparse.Namespace, env: Mapping[str, str]) -> NodeFlags:
    """Interpret the options, with ``PET_NNODES`` and the like for options that are not given.

    Raises:
        UsageError: an option cannot be followed; says which and what to do.
    """
    reader = _Reader(vars(options), env)
    for name, why in REFUSED.items():
        if reader.flag(name):
            raise UsageError(f"--{name} has no meaning here: {why}")
    notes = tuple(f"--{name} changes nothing: {why}" for name, why in IGNORED.items() if reader.given(name))
    common: dict[str, Any] = {
        "slots": _slots(reader.text("nproc-per-node")),
        "log_root": Path(reader.text("log-dir")) if reader.text("log-dir") else None,
        "module": reader.flag("module"),
        "local_addr": reader.text("local-addr"),
        "grace_s": _seconds("--shutdown-timeout ", text, 0.0) if (text := reader.text("shutdown-timeout")) else None,
        "max_restarts": _number("max-restarts", limit, 0) if (limit := reader.text("max-restarts")) else None,
    }
    least, most = _nodes(reader.text("nnodes") or "1")
    backend = reader.text("rdzv-backend") or "static"
    if backend not in ("static", "c10d") and not reader.flag("standalone"):
        raise UsageError(
            f"--rdzv-backend {backend}: nodes come together at node 0 itself, without etcd or the like; use c10d or "
            "static, or leave it out"
        )
    if reader.flag("standalone"):
        if most > 1 and reader.option("nnodes"):
            raise UsageError(f"--standalone is one node, but --nnodes says {reader.text('nnodes')}: leave one out")
        return NodeFlags(**common, notes=notes)
    if most == 1:
        if reader.option("node-rank") and _number("node-rank", reader.text("node-rank"), 0) > 0:
            raise UsageError(f"--node-rank {reader.text('node-rank')} needs --nnodes N, the same on each node")
        return NodeFlags(**common, notes=notes)
    host, port = _endpoint(reader)
    join_s, last_call_s, rank, more = _conf(reader.text("rdzv-conf"))
    if reader.text("node-rank"):
        rank = _number("node-rank", reader.text("node-rank"), 0)
    if rank is not None and rank >= most:
        raise UsageError(f"--node-rank {rank} is not one of {most} nodes: ranks are 0 to {most - 1}")
    return NodeFlags(
        least, most, rank, host, port, join_s=join_s, last_call_s=last_call_s, notes=notes + more, **common
    )


class _Reader:
    """Values of options, else of their ``PET_`` variables."""

    def __init__(self, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._options, self._env = options, env

    def option(self, name: str) -> Any:
        return self._options.get(name.replace("-", "_"))

    def text(self, name: str) -> str:
        value = self.option(name)
        return str(value) if value is not None else self._env.get(f"PET_{name.replace('-', '_').upper()}", "")

    def given(self, name: str) -> bool:
        return bool(self.text(name))

    def flag(self, name: str) -> bool:
        text = self.text(name)
        if text.lower() in ("", "0", "false", "no"):
            return False
        if text.lower() in ("1", "true", "yes"):
            return True
        raise UsageError(f"PET_{name.replace('-', '_').upper()}={text!r}: give 1 or 0")


def _nodes(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) > 2 or not all(_is_number(part, 1) for part in parts):
        raise UsageError(f"--nnodes {text}: give a whole number of at least 1, or two of them as MIN:MAX")
    least, most = int(parts[0]), int(parts[-1])
    if most < least:
        raise UsageError(f"--nnodes {text}: the second number is smaller than the first")
    return least, most


def _endpoint(reader: _Reader) -> tuple[str, int]:
    endpoint, address = reader.text("rdzv-endpoint"), reader.text("master-addr")
    if endpoint:
        return parse_endpoint(endpoint, DEFAULT_PORT)
    if not address:
        raise UsageError(
            "a job of several nodes needs the address of node 0: pass --rdzv-endpoint HOST:PORT, the same on each node"
        )
    host, port = parse_endpoint(address, MASTER_PORT)
    return host, _number("master-port", reader.text("master-port") or str(port), 0)


def _conf(text: str) -> tuple[float, float, int | None, tuple[str, ...]]:
    """Parse ``--rdzv-conf``: seconds to join, seconds for a last call, the rank, notes."""
    values = dict(item.strip().partition("=")[::2] for item in text.split(",") if item.strip())
    rank = values.pop("rank", "")
    if values.pop("is_host", "").lower() in ("1", "true", "t", "yes", "y"):
        rank = "0"
    join = values.pop("join_timeout", "") or values.pop("timeout", "")
    last = values.pop("last_call_timeout", "")
    values.pop("timeout", "")
    return (
        _seconds("--rdzv-conf join_timeout=", join, JOIN_S),
        _seconds("--rdzv-conf last_call_timeout=", last, LAST_CALL_S),
        _number("rdzv-conf rank", rank, 0) if rank else None,
        tuple(f"--rdzv-conf {name} changes nothing: rlmesh has no such setting" for name in values),
    )


def _seconds(name: str, text: str, default: float) -> float:
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}{text}: give a number of seconds")
    return value


def _slots(text: str) -> int | None:
    return None if text in ("", "auto", "gpu", "cpu", "xpu") else _number("nproc-per-node", text, 1)


def _number(name: str, text: str, least: int) -> int:
    if not _is_number(text, least):
        raise UsageError(f"--{name} {text}: give a whole number of at least {least}")
    return int(text)


def _is_number(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= least
