"""Trials: runs of an algorithm with one set of parameters each.

`run` trains an algorithm of `rlmesh.envs` until a criterion is met, or until it is interrupted. One call is one trial;
searches over several sets of parameters are not there yet.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmesh.tune.trial import Trial as Trial
    from rlmesh.tune.trial import run as run

__all__ = ["Trial", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rlmesh.tune' has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module("rlmesh.tune.trial"), name)
    globals()[name] = value
    return value
