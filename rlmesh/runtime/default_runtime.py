"""The default runtime of this process."""

from __future__ import annotations

from rlmesh.errors import UsageError
from rlmesh.runtime.handle import NO_JOB, set_default_caller
from rlmesh.runtime.runtime import Runtime

_default: Runtime | None = None


def set_default_runtime(runtime: Runtime | None) -> None:
    """Set the runtime that ``RoleGroup("X")`` uses in this process, until it is closed."""
    global _default
    _default = runtime
    set_default_caller(runtime.outbound if runtime is not None else None)
    if runtime is not None:
        runtime.on_close = _forget


def _forget(runtime: Runtime) -> None:
    if _default is runtime:
        set_default_runtime(None)


def default_runtime_or_none() -> Runtime | None:
    return _default


def default_runtime() -> Runtime:
    """The runtime that this process uses where no other is named.

    Raises:
        UsageError: this process is not part of a job.
    """
    if _default is None:
        raise UsageError(NO_JOB)
    return _default
