"""A file that a command writes where its user says."""

from __future__ import annotations

from pathlib import Path

from rlmesh.drafts import Draft
from rlmesh.errors import UsageError


def write_output(path: Path, text: str) -> None:
    """Replace a file atomically, readable by its owner only.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with Draft(path, 0o600) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
