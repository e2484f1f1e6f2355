"""A file that a command writes where its user says."""

from __future__ import annotations

import os
from pathlib import Path

from rlmesh.errors import UsageError


def write_output(path: Path, text: str) -> None:
    """Replace a file atomically, readable by its owner only.

    Raises:
        UsageError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # The folder may be one where others can put links: create a new file or fail.
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error}") from error
