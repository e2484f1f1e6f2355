"""`Conversion`: the settings that result from another library's configuration, and a record of each of its keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ABSENT", "Conversion", "flattened", "rows_in"]

N = TypeVar("N", int, float)

SECRETS = ("api_key", "apikey", "auth_token", "hub_token", "access_token", "secret", "password")
"""Keys whose names contain one of these are secrets: their values are not shown."""
TRACKERS = ("wandb", "mlflow", "trackio")
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent", "__bool__": lambda self: False})()
"""The value of a key that a configuration lacks."""


def flattened(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of a dotted key and its value; an empty mapping is a value."""
    for name, value in values.items():
        place = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{place}.")
        else:
            yield place, value


@dataclass
class Conversion:
    """Reads the keys of a configuration, and records what becomes of each.

    Attributes:
        library: name of the library, for texts.
        given: the values of the configuration by dotted keys.
        settings: the settings of a `Run` so far, by dotted keys.
        kept: the settings with the keys that they result from, for people.
        left: keys that would change a training and have no counterpart, each with an advice.
        idle: keys whose values change nothing here.
        together: keys that were read, but have no setting of their own: they influence other settings, or belong to
            something that is off.
        faults: reasons why the configuration cannot be read, one sentence each.
        wanting: settings that the configuration does not determine, with the reason.
        folders: folders with the modules of rewards.
        overrides: settings of the user that replace those read here, by dotted keys. Shares of the steps refer to these
            steps.
    """

    library: str
    given: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    wanting: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; ``default`` if it is missing or null."""
        self._read.add(key)
        value = self.given.get(key)
        return default if value is None else value

    def number(self, kind: type[N], key: str, default: Any) -> N:
        """As `get`, for a key that must be a number (a whole number if ``kind`` is int); another value is a fault."""
        value = self.get(key, default)
        try:
            found = kind(value)
            if isinstance(value, bool) or (kind is int and float(value) != found):
                raise ValueError
        except (TypeError, ValueError):
            self.faults.append(f"{key}={value!r} must be {'a whole number' if kind is int else 'a number'}")
            return kind(default)
        return found

    def is_null(self, key: str) -> bool:
        """True if a key is null, which for some keys differs from the default."""
        self._read.add(key)
        return key in self.given and self.given[key] is None

    def steps(self) -> int | None:
        """The steps of the run; ``None`` if nothing determines them, which the checks of `Run` report."""
        found = self.overrides.get("steps", self.settings.get("steps"))
        return found if isinstance(found, int) and found > 0 else None

    def steps_of(self, epochs: float, batch: int) -> int | None:
        """The number of steps of these epochs; ``None`` if the rows cannot be counted here, or are fewer than a
        batch."""
        size, rows = (
            self.overrides.get("batch_size", batch),
            rows_in(self.overrides.get("data", self.settings.get("data"))),
        )
        if rows is None or not isinstance(size, int) or not 0 < size <= rows:
            return None
        return max(1, int(epochs * (rows // size)))

    def set_steps(self, key: str, epochs: float, batch: int) -> None:
        """Set the steps of the run from a key that counts epochs, or record that they are not determined."""
        if (steps := self.steps_of(epochs, batch)) is not None:
            self.set("steps", steps, key)
            return
        self.wanting["steps"] = (
            f"{key}={epochs:g}: a run counts steps, and the rows of the data cannot be counted here; "
            "set steps=NUMBER (epochs × rows ÷ batch_size)"
        )

    def has(self, key: str) -> bool:
        """True if the configuration has a value for a key."""
        return self.given.get(key) is not None

    def set(self, setting: str, value: Any, *sources: str) -> None:
        """Set a setting that results from these keys. If the configuration has none of them, the value is a default."""
        self.settings[setting] = value
        self._read.update(sources)
        self._told.update(sources)
        named = [_told(key, self.given[key]) for key in sources if self.has(key)]
        self.kept.append((_told(setting, value), ", ".join(named) or f"default of {self.library}"))

    def move(self, key: str, setting: str, default: Any = ABSENT) -> Any:
        """Set a setting to the value of a key with the same meaning, and return it. Does nothing without value and
        default."""
        value = self.get(key, default)
        if value is not ABSENT:
            self.set(setting, value, key)
        return value

    def skip(self, *keys: str) -> None:
        """Mark keys as read: they say nothing here, or other keys have decided already."""
        self._read.update(keys)

    def starting(self, prefix: str | tuple[str, ...]) -> list[str]:
        """The keys of the configuration that begin with a prefix, or with one of several."""
        return [key for key in self.given if key.startswith(prefix)]

    def advise(self, key: str, advice: str) -> None:
        """Record that a key has no counterpart, and what the user can do."""
        self.left.append((key, advice))

    def leave(self, keys: str | Iterable[str], advice: str, *, unless: Any = ABSENT) -> None:
        """Record that keys have no counterpart, as far as the configuration has them.

        Args:
            keys: a key, or several.
            advice: what the user can do.
            unless: a value, or a tuple of values, with which a key changes nothing.
        """
        harmless = unless if isinstance(unless, tuple) else (unless,)
        for key in [keys] if isinstance(keys, str) else keys:
            value = self.get(key)
            if value is None:
                continue
            if any((value is not True and value is not False and value == one) or value is one for one in harmless):
                self.idle.append(key)
            else:
                self.advise(_told(key, value), advice)

    def trackers(self, key: str, others: Sequence[str], project: str | None = None) -> None:
        """Set the trackers from a key that names some. ``others`` are names that need no tracker."""
        names = self.get(key, [])
        names = [names] if isinstance(names, str) else list(names)
        if wanted := [f"{one}:{project}" if project else one for one in names if one in TRACKERS]:
            self.set("trackers", wanted, key)
        for one in names:
            if one not in (*TRACKERS, *others):
                self.advise(f"{key}={one}", f"the trackers are {', '.join(TRACKERS)}, and module:Class")

    def rest(self, harmless: Collection[str], unsupported: Mapping[str, str]) -> None:
        """Record what becomes of all keys that were not read.

        Args:
            harmless: patterns of keys that change no numbers.
            unsupported: patterns of other keys, with an advice.
        """
        self._told.update([*self.idle, *(key.partition("=")[0] for key, _ in self.left)])
        self.together += [key for key in self.given if key in self._read and key not in self._told]
        known = [*self._read, *(pattern for pattern in harmless if "*" not in pattern)]
        for key in self.given:
            if key in self._read:
                continue
            empty = self.given[key] is None or self.given[key] in ({}, [])
            if empty or any(fnmatchcase(key, pattern) for pattern in harmless):
                self.idle.append(key)
            elif advice := [text for pattern, text in unsupported.items() if fnmatchcase(key, pattern)]:
                self.advise(_told(key, self.given[key]), advice[0])
            else:
                near = get_close_matches(key, known, 1, cutoff=0.85)
                meant = f"did you mean {near[0]}?" if near else f"it is no key of {self.library} that is known here"
                self.advise(_told(key, self.given[key]), meant)

    def nested(self) -> dict[str, Any]:
        """The settings with a mapping for each section."""
        found: dict[str, Any] = {}
        for name, value in self.settings.items():
            *sections, last = name.split(".")
            place = found
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        return found

    def report(self, *, whole: bool = False) -> str:
        """A text for people that lists all keys and what became of each.

        Args:
            whole: list the settings too, with the keys that each results from.
        """
        lines = [f"{len(self.kept)} settings were read from a configuration of {self.library}"]
        if whole:
            lines += [f"  {setting}  ← {source}" for setting, source in self.kept]
        if self.left:
            lines.append(f"{len(self.left)} keys have no counterpart:")
            lines += [f"  {key}: {advice}" for key, advice in self.left]
        for keys, what in ((self.together, "were read together with others"), (self.idle, "change nothing here")):
            if keys:
                lines.append(f"{len(keys)} keys {what}: {', '.join(sorted(keys))}")
        return "\n".join(lines)


def rows_in(files: Any) -> int | None:
    """The number of rows of data files; ``None`` if they cannot be read here."""
    from rlmesh.errors import UsageError
    from rlmesh.rl.data.files import expand, read_rows

    try:
        total = 0
        for path in expand(files):
            if path.suffix == ".parquet":
                import pyarrow.parquet as pq

                total += pq.ParquetFile(path).metadata.num_rows
            else:
                total += len(read_rows([Path(path)]))
    except (UsageError, OSError, ImportError, TypeError, ValueError):
        return None
    return total


def _told(key: str, value: Any) -> str:
    """A key and its value for people and logs, without secrets."""
    return f"{key}={_short(_masked(key, value))}"


def _masked(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(str(name), one) for name, one in value.items()}
    if isinstance(value, list):
        return [_masked(key, one) for one in value]
    secret = any(word in key.lower().rpartition(".")[2] for word in SECRETS)
    return "…" if secret and isinstance(value, str) else value


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
