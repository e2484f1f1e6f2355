"""Environments by name, by class or by creator."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from rlmesh.errors import UsageError, import_fault, is_absent

__all__ = ["EnvContext", "EnvCreator", "did_you_mean", "env_creator_of", "register_env", "unregister_env"]

EnvCreator = Callable[["EnvContext"], Any]
"""A function from an `EnvContext` to a Gymnasium environment or vector environment."""

_REGISTERED: dict[str, EnvCreator] = {}
_PACKAGES = {"ALE": ("ale_py", "rlmesh[atari]")}
"""Packages that register the ids of a namespace with Gymnasium when they are imported, and what installs them."""


class EnvContext(dict[str, Any]):
    """The configuration of an environment (``env_config``), and the place of the environment among its siblings.

    Attributes:
        worker_index: number of the runner: 0 for the local one, 1, 2, … for remote ones.
        vector_index: number of the environment in its runner.
        num_workers: number of remote runners.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, *, worker_index: int = 0, vector_index: int = 0,
        num_workers: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(config or {})
        self.worker_index, self.vector_index, self.num_workers = worker_index, vector_index, num_workers


def register_env(name: str, creator: EnvCreator) -> None:
    """Give an environment a name: ``register_env("maze", lambda context: Maze(context["size"]))``.

    A later registration of the same name replaces the earlier one. Runners in other processes receive the creator
    itself, so only the process that builds the algorithm registers the name.
    """
    if not isinstance(name, str):
        raise UsageError(f"register_env: the name is text, not {name!r}")
    if not callable(creator):
        raise UsageError(f"register_env({name!r}, …): the creator is a function of an EnvContext, not {creator!r}")
    _REGISTERED[name] = creator


def registered_creator(name: str) -> EnvCreator | None:
    """The creator that `register_env` was given in this process; None if there is none."""
    return _REGISTERED.get(name)


def unregister_env(name: str) -> None:
    """Forget a name of `register_env`; a name that is not there is no error."""
    _REGISTERED.pop(name, None)


def env_creator_of(env: str | type | EnvCreator) -> EnvCreator:
    """The creator of an environment that is given as a registered name, a Gymnasium id, a class or a creator.

    A class whose first argument is its configuration (it has no default, or a name such as ``config`` or ``context``)
    gets the `EnvContext`. Another class gets the keys of ``env_config`` as keywords, as with ``gymnasium.make``.

    Raises:
        UsageError: there is no environment of this name, or the value is none of these; names the nearest name.
    """
    if isinstance(env, str):
        if env in _REGISTERED:
            return _REGISTERED[env]
        creator = _GymnasiumId(env)
        creator.register()
        _require_id(env)
        return creator
    if isinstance(env, type):
        return _OfClass(env)
    if callable(env):
        return env
    raise UsageError(f"an environment is a name, a class or a creator, not {env!r} ({type(env).__name__})")


class _GymnasiumId:
    """Creator of an environment of Gymnasium's registry; ``env_config`` has the keywords of ``gymnasium.make``."""

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id

    def __call__(self, context: EnvContext) -> Any:
        import gymnasium

        self.register()
        # The module of an id such as "module:Maze-v0" registers the id when Gymnasium makes the environment.
        if ":" not in self.env_id and self.env_id not in gymnasium.registry and _is_of_envpool(self.env_id):
            raise UsageError(f"{self.env_id!r} is an environment of EnvPool: set env_runners(vectorize_mode='envpool')")
        return gymnasium.make(self.env_id, **{"disable_env_checker": True, **context})

    def register(self) -> None:
        """Let the package of this id register it, in this process.

        Raises:
            UsageError: the package is not installed, or its import fails.
        """
        import gymnasium

        module, install = _PACKAGES.get(self.env_id.partition("/")[0], ("", ""))
        if not module:
            return
        try:
            gymnasium.register_envs(import_module(module))
        except Exception as error:  # a broken installation may raise anything
            raise UsageError(f"the environment {self.env_id!r}: {import_fault(module, error, install)}") from error


class _OfClass:
    """Creator of an environment by its class; see `env_creator_of` for what the class gets."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        try:
            parameters = list(inspect.signature(cls).parameters.values())
        except ValueError:  # of compiled code
            parameters = []
        self.takes_config = bool(parameters) and _is_config(parameters)
        self.keywords = [
            each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        self.takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)

    def __call__(self, context: EnvContext) -> Any:
        if self.takes_config:
            return self.cls(context)
        for name in context if not self.takes_any else ():
            if name not in self.keywords:
                hint = did_you_mean(name, self.keywords) if self.keywords else " It takes none."
                raise UsageError(f"env_config has {name!r}, which is no argument of {self.cls.__name__}.{hint}")
        return self.cls(**context)


def _is_config(parameters: list[inspect.Parameter]) -> bool:
    """True if the first argument of a class is its configuration, and not a setting of its own such as ``size=5``."""
    first = parameters[0]
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return False
    if first.default is first.empty or re.search("conf|cfg|context|ctx", first.name):
        return True
    return len(parameters) == 1 and first.name != "render_mode" and (first.default is None or first.default == {})


def _require_id(env_id: str) -> None:
    import gymnasium

    try:
        gymnasium.spec(env_id)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        if ":" not in env_id and _is_of_envpool(env_id):
            return
        known = [*_REGISTERED, *map(str, gymnasium.registry)]
        hint = did_you_mean(env_id, known, listed=False)
        raise UsageError(
            f"there is no environment {env_id!r}: neither register_env nor Gymnasium knows the name ({error}).{hint}"
        ) from None


def _is_of_envpool(env_id: str) -> bool:
    """True if EnvPool is there and has this id, which Gymnasium does not know.

    Raises:
        UsageError: EnvPool is installed, but cannot be imported, so that nobody knows whether it has the id.
    """
    try:
        return env_id in import_module("envpool").list_all_envs()
    except Exception as error:  # a broken installation may raise anything
        if is_absent("envpool", error):
            return False
        raise UsageError(
            f"neither register_env nor Gymnasium knows the environment {env_id!r}, and EnvPool cannot be asked: "
            + import_fault("envpool", error, "rlmesh[envpool]")
        ) from error


def did_you_mean(name: str, valid: Iterable[str], *, listed: bool = True) -> str:
    """`` Did you mean 'x'?`` for the nearest valid name; if none is near, a list of the names, or nothing."""
    names = sorted(set(valid))
    lowered = {each.lower(): each for each in names}
    near = difflib.get_close_matches(str(name).lower(), list(lowered), n=1, cutoff=0.6)
    if near:
        return f" Did you mean {lowered[near[0]]!r}?"
    return f" Valid: {', '.join(names)}." if names and listed else ""
