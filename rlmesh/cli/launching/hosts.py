"""``rlmesh launch --hosts hosts.toml JOB.py``: starts the job's nodes over ssh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.job.masking import mask_text
from rlmesh.runtime.connections.security import make_key

PASSED_ON = (
    "view",
    "run_dir",
    "restart",
    "max_restarts",
    "log_dir",
    "nproc_per_node",
    "rdzv_conf",
    "grace",
    "shutdown_timeout",
    "stop_within",
    "chaos",
    "metrics",
    "tracker",
    "timeline",
    "module",
)
"""Options of ``launch`` that are passed on to every host."""
NOT_WITH_HOSTS = ("nnodes", "node_rank", "rdzv_endpoint", "master_addr", "master_port", "local_addr", "standalone")


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group = parser.add_argument_group("several nodes, over ssh")
    group.add_argument("--hosts", metavar="FILE", type=Path, help="hosts.toml: the machines, the first runs the script")


def launch_on_hosts(options: argparse.Namespace, arguments: list[str], key: bytes | None) -> int:
    """Run the job on the hosts of the file, or print the commands; return the exit code.

    Raises:
        UsageError: the options contradict each other, or the file is not valid.
        LaunchError: a host did not become part of the job.
    """
    from rlmesh_launcher import ssh
    from rlmesh_launcher.hosts import read_hosts

    if wrong := [f"--{name.replace('_', '-')}" for name in NOT_WITH_HOSTS if getattr(options, name, None)]:
        raise UsageError(f"--hosts says which nodes there are: leave out {', '.join(wrong)}")
    hosts = read_hosts(options.hosts)
    commands = ssh.render(
        hosts, ssh.reached_by(hosts[0]), passed_on(options), [options.job, *(["--", *arguments] if arguments else [])]
    )
    if options.dry_run:
        print(mask_text("\n".join(map(str, commands))))
        for host in hosts:
            if host.env:
                print(f"# {host.name} gets these variables on standard input: {', '.join(sorted(host.env))}")
        return 0
    if len(hosts) == 1:
        raise UsageError(f"{options.hosts} names one host: run `rlmesh launch` there, or name a second one")
    print(f"rlmesh: {len(hosts)} nodes over ssh: {', '.join(host.name for host in hosts)}", file=sys.stderr, flush=True)
    return ssh.run(commands, key or make_key())


def passed_on(options: argparse.Namespace) -> list[str]:
    """The options for every host, as words."""
    words = []
    for name in PASSED_ON:
        option, value = f"--{name.replace('_', '-')}", getattr(options, name, None)
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                words.append(option)
            elif each is not None and each is not False and each != "":
                words += [option, str(each)]
    return words
