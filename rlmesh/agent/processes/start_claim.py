"""The claim on a member's start, which one process alone can have: the zygote's fork, or the agent.

A zygote can be stopped or killed after it has forked a worker and before it has told the agent so. The agent then does
not know whether the worker runs, and if it started another one, the same member could run twice. So each fork makes a
claim before it begins. An agent that gets no answer makes the claim itself: either no fork begins from then on, or the
agent learns which process has the claim.

The claim is a symbolic link whose target is the number of the process that has it. The kernel makes a link with its
target in one step, and refuses to make it again.
"""

from __future__ import annotations

import os

__all__ = ["make_claim", "remove_claim"]


def make_claim(path: str) -> int:
    """Claim a start for this process; return the number of the process that has the claim.

    Raises:
        OSError: the claim cannot be made, for example because its folder is gone.
    """
    try:
        os.symlink(str(os.getpid()), path)
    except FileExistsError:
        return int(os.readlink(path))
    return os.getpid()


def remove_claim(path: str) -> None:
    """Remove the claim of a process that has ended. A claim that is gone is no error."""
    try:
        os.unlink(path)
    except OSError:
        pass  # it goes with its folder
