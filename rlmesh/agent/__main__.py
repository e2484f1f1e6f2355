"""``python -m rlmesh.agent``: the agent of one node, with its configuration on standard input."""

from __future__ import annotations

import os
import sys

from rlmesh.agent.boot import boot
from rlmesh.agent.node_start import decode_config
from rlmesh.agent.processes import ownership


def main() -> int:
    """Start the slow processes, then import the rest of the agent and run it."""
    ownership.prctl(ownership.PR_SET_CHILD_SUBREAPER, 1)
    ownership.prctl(ownership.PR_SET_NAME, b"rlmesh-agent")
    guardian = int(os.environ.pop(ownership.GUARDIAN, os.getppid()))  # no process that is started below needs it
    line = _first_line(0)
    config = decode_config(line)
    started = boot(config, line)

    from rlmesh.agent.lifecycle import run_agent

    return run_agent(config, started, guardian)


def _first_line(fd: int) -> bytes:
    """Read one line and nothing after it: the pipe stays open, and more may come."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            break
        line += chunk
    return line


if __name__ == "__main__":
    sys.exit(main())
