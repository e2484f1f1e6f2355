"""Trials of the algorithms of `rlmesh.envs`, and searches for good settings, with the names of Ray Tune.

`run` trains an algorithm until a criterion is met, or until it is interrupted. Settings may be search spaces, such as
``grid_search([…])`` or ``loguniform(1e-5, 1e-3)``: then each combination of values is a trial. `OptunaSearch` chooses
the values by a study of Optuna, whose pruner ends trials early.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmesh.tune.analysis import ExperimentAnalysis as ExperimentAnalysis
    from rlmesh.tune.running import TrialsFailed as TrialsFailed
    from rlmesh.tune.running import run as run
    from rlmesh.tune.search import OptunaSearch as OptunaSearch
    from rlmesh.tune.space import choice as choice
    from rlmesh.tune.space import grid_search as grid_search
    from rlmesh.tune.space import lograndint as lograndint
    from rlmesh.tune.space import loguniform as loguniform
    from rlmesh.tune.space import qlograndint as qlograndint
    from rlmesh.tune.space import qloguniform as qloguniform
    from rlmesh.tune.space import qrandint as qrandint
    from rlmesh.tune.space import qrandn as qrandn
    from rlmesh.tune.space import quniform as quniform
    from rlmesh.tune.space import randint as randint
    from rlmesh.tune.space import randn as randn
    from rlmesh.tune.space import sample_from as sample_from
    from rlmesh.tune.space import uniform as uniform
    from rlmesh.tune.trial import Trial as Trial

_SPACE = (
    "choice", "grid_search", "lograndint", "loguniform", "qlograndint", "qloguniform", "qrandint", "qrandn", "quniform",
    "randint", "randn", "sample_from", "uniform",
)  # fmt: skip
_WHERE = {
    "ExperimentAnalysis": "rlmesh.tune.analysis",
    "OptunaSearch": "rlmesh.tune.search",
    "Trial": "rlmesh.tune.trial",
    "TrialsFailed": "rlmesh.tune.running",
    "run": "rlmesh.tune.running",
    **dict.fromkeys(_SPACE, "rlmesh.tune.space"),
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'rlmesh.tune' has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(where), name)
    globals()[name] = value
    return value
