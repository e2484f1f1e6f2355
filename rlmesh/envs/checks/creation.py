"""Environments by name: registered with Gymnasium, or ``module:creator``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

from rlmesh.errors import UsageError

__all__ = ["creator_of"]


def creator_of(name: str, config: Mapping[str, Any] | None = None, num_envs: int = 0) -> Callable[[], Any]:
    """A function without arguments that makes the environment of this name.

    Args:
        name: a name that is registered with Gymnasium, also as ``module:Name-v0``, or ``module:creator``: a function or
            class of a module that can be imported.
        config: keyword arguments for a registered environment; the one argument of a creator.
        num_envs: makes a vector environment of so many, where the name is a registered one.

    Raises:
        UsageError: there is no such module, creator or environment.
    """
    import gymnasium

    config = dict(config or {})
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            found = import_module(module)
        except ImportError as error:
            raise UsageError(
                f"environment {name!r}: the module {module!r} cannot be imported: {error}. Run the command where "
                f"`import {module}` works"
            ) from error
        if (creator := getattr(found, attribute, None)) is not None:
            return _called(name, creator, config)
    if (attribute or name) not in gymnasium.registry:
        known = {known.lower(): known for known in gymnasium.registry}
        near = get_close_matches((attribute or name).lower(), list(known), 1)
        hint = f"did you mean {known[near[0]]!r}?" if near else "it is not registered with Gymnasium"
        places = f"{module} has no {attribute!r}, and " if colon else ""
        raise UsageError(
            f"environment {name!r}: {places}there is no registered environment of this name; {hint} An environment of "
            "your own is named module:creator"
        )
    if num_envs:
        return partial(gymnasium.make_vec, attribute or name, num_envs=num_envs, **config)
    return partial(gymnasium.make, attribute or name, disable_env_checker=True, **config)


def _called(name: str, creator: Any, config: dict[str, Any]) -> Callable[[], Any]:
    if not callable(creator):
        raise UsageError(f"environment {name!r}: a {type(creator).__name__} is not a function or class that makes one")
    try:
        parameters = list(inspect.signature(creator).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind in positional]
    if len(needed) > 1:
        raise UsageError(
            f"environment {name!r}: the creator needs {len(needed)} arguments, {', '.join(n.name for n in needed)}; "
            "it may need one, the configuration"
        )
    if needed or config:
        return partial(creator, config)
    return partial(creator)
