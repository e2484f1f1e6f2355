"""Environments by name: registered with Gymnasium, or ``module:creator``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from rlmesh.envs.environments.registry import EnvContext, did_you_mean
from rlmesh.errors import UsageError

__all__ = ["called", "creator_of"]


def creator_of(name: str, config: Mapping[str, Any] | None = None, num_envs: int = 0) -> Callable[[], Any]:
    """A function without arguments that makes the environment of this name.

    Args:
        name: a name that is registered with Gymnasium, also as ``module:Name-v0``, or ``module:creator``: a function or
            class of a module that can be imported.
        config: keyword arguments for a registered environment; the `EnvContext` of a creator.
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
            return called(name, creator, config)
    if (attribute or name) not in gymnasium.registry:
        hint = did_you_mean(attribute or name, gymnasium.registry, listed=False)
        places = f"{module} has no {attribute!r}, and " if colon else ""
        raise UsageError(
            f"environment {name!r}: {places}Gymnasium has no environment of this name.{hint} An environment of your "
            "own is named module:creator"
        )
    if num_envs:
        return partial(gymnasium.make_vec, attribute or name, num_envs=num_envs, **config)
    return partial(gymnasium.make, attribute or name, disable_env_checker=True, **config)


def called(name: str, creator: Any, config: Mapping[str, Any]) -> Callable[[], Any]:
    """A creator or class, with the `EnvContext` that a runner would give it, if it takes an argument.

    Raises:
        UsageError: the value cannot be called, or not with one argument.
    """
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
    return partial(creator, EnvContext(config)) if needed or config else partial(creator)
