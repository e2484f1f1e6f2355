"""`read_run`: makes a `Run` from plain values, such as those of a YAML file, or lists all of their faults.

Keys are those of `Run` and its sections. Algorithm and rewards are given by name (:mod:`rlmesh.rl.trainers.named`)::

    {"model": "…", "data": "…", "rewards": ["gsm8k"], "algorithm": {"name": "grpo", "samples": 8}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from rlmesh.errors import UsageError
from rlmesh.rl.faults import keys_of, unknown_key, value_of
from rlmesh.rl.rewards.model import RewardModel
from rlmesh.rl.rewards.reward import Reward
from rlmesh.rl.trainers.named import find_algorithm, find_reward, imported_parts
from rlmesh.rl.trainers.preflight import QUICK, quick_faults
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import as_list, checked, kind_named

__all__ = ["as_mapping", "read_run"]

REQUIRED = tuple(
    one.name
    for one in dataclasses.fields(Run)
    if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
)


def read_run(config: Any, overrides: Sequence[str] = (), *, look: bool = False) -> tuple[Run | None, list[str]]:
    """Make the run that values describe, or find all their faults, as far as that is quick.

    Args:
        config: a mapping, a dataclass, or a configuration of OmegaConf (as Hydra gives it).
        overrides: ``section.key=value`` texts, which replace values of ``config``.
        look: if there is a fault, check the model's folder and the data files too, so that their faults are reported
            with it.

    Returns:
        a run and no faults, or ``None`` and one sentence per fault.
    """
    reader = _SettingsReader()
    try:
        values = as_mapping(config)
    except UsageError as error:
        return None, [str(error)]
    for text in overrides:
        reader.override(values, text)
    run = reader.run(values)
    if look and reader.faults:
        reader.faults += quick_faults(**{key: values.get(key, getattr(Run, key, None)) for key in QUICK})
    return (None if reader.faults else run), reader.faults


def as_mapping(config: Any, *, missing_ok: bool = False) -> dict[str, Any]:
    """Convert a mapping, a dataclass (with dataclasses as sections) or an OmegaConf object to plain values.

    Args:
        config: the values.
        missing_ok: leave OmegaConf's missing values as the text ``???``.

    Raises:
        UsageError: ``config`` is none of these, or OmegaConf has a missing value.
    """
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import DictConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if isinstance(config, DictConfig):
            try:
                config = OmegaConf.to_container(config, resolve=True, throw_on_missing=not missing_ok)
            except OmegaConfBaseException as error:
                raise UsageError(f"the configuration has a value that OmegaConf cannot give: {error}") from error
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    if not isinstance(config, Mapping):
        raise UsageError(f"a configuration is a mapping, an OmegaConf or a dataclass, got {type(config).__name__}")
    return {str(key): value for key, value in config.items()}


class _SettingsReader:
    """Turns values into settings, and collects faults instead of raising the first."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.sections = dict(keys_of(Run))

    def override(self, values: dict[str, Any], text: str) -> None:
        """Set one value of nested mappings; missing sections are made."""
        path, equals, value = text.partition("=")
        if not equals:
            self.faults.append(f"{text!r} is no setting: write section.key=value")
            return
        *outer, last = path.strip().split(".")
        place: Any = values
        for name in outer:
            inner = place.get(name)
            if isinstance(inner, str):
                inner = {"engine" if name == "rollout" else "name": inner}
            elif dataclasses.is_dataclass(inner) and not isinstance(inner, type):
                # What the object computed itself is no setting.
                settings = {one.name: getattr(inner, one.name) for one in dataclasses.fields(inner) if one.init}
                inner = settings | ({"name": type(inner)} if name == "algorithm" else {})
            elif inner is not None and not isinstance(inner, Mapping):
                self.faults.append(f"{path.strip()}: {name} has no settings of its own")
                return
            place[name] = dict(inner or {})
            place = place[name]
        place[last] = value_of(value.strip())

    def run(self, values: Mapping[str, Any]) -> Run | None:
        algorithm = self.algorithm(values["algorithm"]) if "algorithm" in values else None
        rewards = self.rewards(values["rewards"]) if values.get("rewards") else []
        unread = values.get("rewards") and not rewards
        rest = {key: value for key, value in values.items() if key not in ("algorithm", "rewards")}
        arguments = self.arguments(Run, imported_parts(rest, self.faults), "")
        missing = [key for key in REQUIRED if values.get(key) is None]
        self.faults += [f"{key} is missing: {_MEANING[key]}" for key in missing]
        found = dict(arguments)
        found["algorithm"] = (
            algorithm
            if algorithm is not None
            else SimpleNamespace(needs=frozenset(), samples=1, responses="sampled", rewarded=True)
        )
        # If the algorithm or a reward could not be read, "no reward" would be a wrong fault.
        found["rewards"] = rewards or ([Reward(_nothing)] if unread or algorithm is None else [])
        for key in REQUIRED:
            found.setdefault(key, "?")
        try:
            # Values with a known fault are left out, so that `Run` can check the others.
            run = Run(**found)
        except UsageError as error:
            self.faults += str(error).removeprefix("Run: ").split("\n  ")
            return None
        return run

    def arguments(self, kind: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The valid values of a section, as arguments of its class; the faults of the others are collected."""
        hints = get_type_hints(kind)
        known = {one.name for one in dataclasses.fields(kind) if one.init}
        found = {}
        for key, given in values.items():
            if key not in known:
                self.faults.append(unknown_key(f"{where}{key}", self.sections))
                continue
            value = self.value(hints[key], given, f"{where}{key}")
            if value is not _WRONG:
                found[key] = value
        return found

    def value(self, kind: Any, given: Any, place: str) -> Any:
        section = _section_in(kind)
        if section is not None and not isinstance(given, section):
            if isinstance(given, str) and place == "rollout":
                given = {"engine": given}
            if isinstance(given, Mapping) or (dataclasses.is_dataclass(given) and not isinstance(given, type)):
                inner = as_mapping(given)
                self.sections[place] = tuple(one.name for one in dataclasses.fields(section) if one.init)
                before = len(self.faults)
                arguments = self.arguments(section, inner, f"{place}.")
                try:
                    made = section(**arguments)
                except (UsageError, ValueError, TypeError) as error:
                    self.faults.append(f"{place}: {error}")
                    return _WRONG
                self.faults += [f"{place}.{fault}" for fault in getattr(made, "faults", tuple)()]
                return made if len(self.faults) == before else _WRONG
        if isinstance(given, list) and get_origin(_without_none(kind)) is tuple:
            given = tuple(given)
        given = as_list(given, kind)
        if not checked(given, kind):
            self.faults.append(f"{place}={given!r} must be {kind_named(kind)}")
            return _WRONG
        return given

    def algorithm(self, given: Any) -> Any:
        """An algorithm from its name, from a mapping of name and settings, or from an `Algorithm` itself."""
        if hasattr(given, "weigh") and not isinstance(given, type):
            return given
        settings = {"name": given} if isinstance(given, (str, type)) else given
        try:
            settings = as_mapping(settings)
        except UsageError:
            self.faults.append(f"algorithm={given!r} must be a name, or a mapping with a name: {{name: grpo, …}}")
            return None
        name = settings.pop("name", None)
        if name is None:
            self.faults.append("algorithm.name is missing: write {name: grpo, samples: 8}")
            return None
        try:
            kind = name if isinstance(name, type) else find_algorithm(str(name))
        except UsageError as error:
            self.faults.append(f"algorithm.name: {error}")
            return None
        self.sections["algorithm"] = tuple(one.name for one in dataclasses.fields(kind) if one.init)
        before = len(self.faults)
        arguments = self.arguments(kind, settings, "algorithm.")
        try:
            made = kind(**arguments)
        except (UsageError, ValueError, TypeError) as error:
            self.faults.append(f"algorithm: {error}")
            return None
        return made if len(self.faults) == before else None

    def rewards(self, given: Any) -> list[Reward | RewardModel]:
        entries = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        found = [self.reward(one, f"rewards[{place}]") for place, one in enumerate(entries)]
        return [one for one in found if one is not None]

    def reward(self, given: Any, place: str) -> Reward | RewardModel | None:
        if isinstance(given, Reward | RewardModel):
            return given
        settings = {"function": given} if isinstance(given, str) or callable(given) else given
        try:
            settings = as_mapping(settings)
        except UsageError:
            self.faults.append(f"{place}={given!r} must be a name, module:function, or a mapping with a function")
            return None
        kind: type[Any] = RewardModel if "model" in settings else Reward
        what = "model" if kind is RewardModel else "function"
        chosen = settings.pop(what, None)
        if chosen is None:
            self.faults.append(f"{place}.function is missing: write module:function, or model: FOLDER")
            return None
        before = len(self.faults)
        sections, self.sections = self.sections, {place: tuple(one.name for one in dataclasses.fields(kind))}
        arguments = self.arguments(kind, settings, f"{place}.")
        self.sections = sections
        try:
            scorer = find_reward(chosen) if kind is Reward and isinstance(chosen, str) else chosen
            made: Reward | RewardModel = kind(scorer, **arguments)
        except UsageError as error:
            self.faults.append(f"{place}: {error}")
            return None
        return made if len(self.faults) == before else None


_WRONG = object()
_MEANING = {
    "model": "a folder or a hub name",
    "data": "files or rows of prompts",
    "rewards": "a list of names or module:function, or {model: FOLDER}",
    "algorithm": "such as {name: grpo, samples: 8}",
}


def _nothing(response: str) -> None:
    """Stands for a reward that could not be read, so that the other settings can be checked."""


def _section_in(kind: Any) -> type[Any] | None:
    """The dataclass of settings that a field of this type may hold; ``None``: it holds none."""
    for one in get_args(kind) or (kind,):
        if isinstance(one, type) and dataclasses.is_dataclass(one):
            return one
    return None


def _without_none(kind: Any) -> Any:
    others = [one for one in get_args(kind) if one is not type(None)]
    return others[0] if len(others) == 1 and type(None) in get_args(kind) else kind
