"""One measurement of benchmarks/envs_compare.py: a program with a limit, whose processes all end with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["last_line", "measured"]

MARK = "ENVS_COMPARE_MEASUREMENT"
"""The variable that all processes of a measurement inherit, by which those that outlive it are found."""


def measured(command: list[str], limit_s: float, grace_s: float = 60) -> dict[str, Any]:
    """What a program printed last; ``failed`` has the reason if that is no result.

    Its output goes to files: a pipe would stay open as long as any process of a peer does. A program that is still
    there ``grace_s`` after its limit is killed; if it told of its way, the result is how far it came.
    """
    mark = secrets.token_hex(8)
    variables = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", MARK: mark,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="envs-", ignore_cleanup_errors=True) as folder:
        out, err = Path(folder, "out.txt"), Path(folder, "err.txt")
        with out.open("w") as to, err.open("w") as to_err:
            program = subprocess.Popen(command, stdout=to, stderr=to_err, env=variables, cwd=folder)
        try:
            status: int | None = program.wait(limit_s + grace_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            program.kill()
            program.wait()
            kill_marked(mark)
        found = last_line(out.read_text(errors="replace"))
        reason = (err.read_text(errors="replace").strip().splitlines() or ["no word on standard error"])[-1][:300]
    if status == 0 and found is not None and "partial" not in found:
        return found
    if status is None and found is not None and found.pop("partial", False):
        return {**found, "reached": False, "stopped": f"{limit_s:.0f} s"}
    if status is None:
        return {"failed": f"nothing within {limit_s + grace_s:.0f} s"}
    return {"failed": f"exit status {status}: {reason}"}


def last_line(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object; libraries print other things too."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def kill_marked(mark: str) -> None:
    """Kills the processes that have the mark, such as servers of a peer whose driver was killed."""
    wanted = f"{MARK}={mark}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
