"""The default runtime of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.runtime.runtime import Runtime

_default: Runtime | None = None


def set_default_runtime(runtime: Runtime | None) -> None:
    """Set the runtime that ``RoleGroup("X")`` uses in this process."""
    global _default
    _default = runtime


def default_runtime_or_none() -> Runtime | None:
    return _default


def default_runtime() -> Runtime:
    """The runtime that this process uses where no other is named.

    Raises:
        UsageError: this process is not part of a job.
    """
    if _default is None:
        raise UsageError(
            "this process is not part of a job, so it cannot call roles: RoleGroup works in role classes and entry "
            "points that a job started. In a program of your own, pass RoleGroup(…, runtime=…)"
        )
    return _default
