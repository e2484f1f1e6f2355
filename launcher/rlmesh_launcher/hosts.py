"""``hosts.toml``: the machines of a job that is launched over ssh, in the order of their ranks.

::

    python = "/opt/venv/bin/python"      # what follows holds for all hosts, and each may say otherwise
    directory = "/shared/project"
    user = "me"
    ssh_options = ["-p", "2222"]
    env = { HF_HOME = "/scratch/hf" }

    [[host]]
    name = "gpu1"                        # as ssh knows it; the first one runs the script
    address = "10.0.0.1"                 # at which the other hosts reach it; by default what ssh connects to

    [[host]]
    name = "gpu2"
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.job.nearest_name import did_you_mean

__all__ = ["RemoteHost", "parse_hosts", "read_hosts"]


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """One machine.

    Attributes:
        name: what ssh connects to: a name, an address, or an alias of ssh's own configuration.
        address: at which the other hosts reach it, numeric or a name; empty: what ssh connects to.
        user: to log in as; empty leaves it to ssh.
        python: the interpreter that has rlmesh there.
        directory: where it starts there; the folder of the submitter by default.
        ssh_options: put before the name, as they stand.
        env: variables for the processes there.
    """

    name: str
    address: str = ""
    user: str = ""
    python: str = sys.executable
    directory: str = ""
    ssh_options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


_KEYS = {each.name for each in fields(RemoteHost)}


def read_hosts(path: Path) -> tuple[RemoteHost, ...]:
    """The hosts of a file.

    Raises:
        UsageError: it cannot be read, or says what it cannot say; names the line or key.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"the file of hosts {path} cannot be read: {error.strerror}") from None
    return parse_hosts(text, str(path))


def parse_hosts(text: str, where: str, directory: str | None = None) -> tuple[RemoteHost, ...]:
    """The same for text; ``directory`` is where hosts start that say nothing else (default: this process's)."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is no TOML: {error}") from None
    listed = values.pop("host", None)
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise UsageError(
            f"{where} names no hosts: it needs a [[host]] with a name for each machine, the first one's first"
        )
    common = {"directory": os.getcwd() if directory is None else directory, **values}
    hosts = tuple(_host({**common, **each}, f"{where}: host {number}") for number, each in enumerate(listed))
    names = [host.name for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{where} names {', '.join(twice)} more than once: one entry per machine")
    return hosts


def _host(values: Mapping[str, Any], where: str) -> RemoteHost:
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise UsageError(f"{where}: there is no key {key!r} (keys: {known}).{did_you_mean(key, _KEYS)}")
        checked[key] = _checked(key, value, where)
    name = checked.get("name", "")
    if not name or name.startswith("-"):
        raise UsageError(f"{where} has no name that ssh could connect to")
    return RemoteHost(**checked)


def _checked(key: str, value: Any, where: str) -> object:
    if key == "ssh_options":
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise UsageError(f'{where}: ssh_options is a list of text, such as ["-p", "2222"], not {value!r}')
    if key == "env":
        if not isinstance(value, dict):
            raise UsageError(f'{where}: env is a table of text, such as {{ NAME = "value" }}, not {value!r}')
        # Only names: the values may be secret.
        if wrong := [name for name, each in value.items() if not isinstance(each, str) or "\0" in each]:
            raise UsageError(f'{where}: env is a table of text, such as {{ NAME = "value" }}; {wrong[0]} is none')
        if wrong := [name for name in value if not (name.isascii() and name.isidentifier())]:
            raise UsageError(f"{where}: env names a variable {wrong[0]!r}: letters, digits and _ only, no digit first")
        return dict(value)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key} is text, not {value!r}")
    return value
