"""Standard input, output and error of a process that was started without them (``>&-``, some services).

The next file that such a process opens would get the free descriptor: a socket would become standard output, and every
print would write into it. So the free descriptors are opened on ``/dev/null`` first.
"""

from __future__ import annotations

import os
import sys

__all__ = ["fill_standard_streams"]


def fill_standard_streams() -> None:
    """Open the closed standard streams, for this process and its children."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open() returns the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
