"""The error file, in which ``torch.distributed.elastic``'s ``@record`` notes the exception that ends a process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["ERROR_FILE", "read_error_file"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LIMIT_BYTES = 1 << 18


def read_error_file(env: Mapping[str, str]) -> tuple[str, str]:
    """Read the error file of a process with this environment: the exception in one sentence, and its traceback. Empty
    if there is no readable file."""
    path = env.get(ERROR_FILE)
    if not path:
        return "", ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            noted: Any = json.loads(file.read(LIMIT_BYTES))
    except (OSError, ValueError):
        return "", ""
    message = noted.get("message") if isinstance(noted, dict) else None
    if isinstance(message, str):
        return message, ""
    if not isinstance(message, dict):
        return "", ""
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(message.get("message") or ""), str(stack or "")
