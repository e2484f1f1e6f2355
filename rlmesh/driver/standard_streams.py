"""Standard input, output and error of a process that was started without them (``>&-``, some services).

The next descriptor that such a process opens gets the free number: a socket would be standard output, and whatever
prints would write into it. So the numbers are taken by ``/dev/null`` first.
"""

from __future__ import annotations

import os
import sys

__all__ = ["fill_standard_streams"]


def fill_standard_streams() -> None:
    """Open what is closed, for this process and those that it starts."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
