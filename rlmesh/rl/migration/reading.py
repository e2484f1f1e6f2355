"""`converted`: converts another library's configuration to settings of a `Run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.faults import did_you_mean, value_of
from rlmesh.rl.migration import trl, verl
from rlmesh.rl.migration.keys import Conversion, flattened
from rlmesh.rl.trainers.config_files import read_values, settings_fault
from rlmesh.rl.trainers.config_reader import as_mapping, read_run

__all__ = ["SOURCES", "converted", "load_converted"]

SOURCES = ("verl", *(f"trl-{kind}" for kind in trl.KINDS))
"""The values of ``rlmesh train --from`` and ``Run.from_config(source=…)``."""


def load_converted(
    config: Any, source: str, overrides: Sequence[str] = (), *, look: bool = False
) -> tuple[Any, Conversion]:
    """The `Run` that another library's configuration describes, and the record of its keys.

    Args:
        config: a YAML or JSON file, or values as for `converted`.
        source: one of `SOURCES`.
        overrides: ``section.key=value`` texts with the keys of a `Run`, which replace what was read.
        look: see `rlmesh.rl.trainers.config_files.load_run`.

    Raises:
        UsageError: lists all faults.
    """
    found = converted(read_values(Path(config)) if isinstance(config, (str, Path)) else config, source, overrides)
    sys.path += [folder for folder in found.folders if folder not in sys.path]
    given = {text.partition("=")[0].strip() for text in overrides}
    wanting = [text for setting, text in found.wanting.items() if setting not in given]
    run, faults = read_run(found.nested(), overrides, look=look)
    faults = [*found.faults, *wanting, *faults]
    if run is None or faults:
        raise settings_fault(faults)
    return run, found


def converted(config: Any, source: str, overrides: Sequence[str] = ()) -> Conversion:
    """Read a configuration of another library.

    Args:
        config: nested or dotted keys, an OmegaConf or a dataclass such as ``GRPOConfig``.
        source: one of `SOURCES`.
        overrides: as for `load_converted`. They are not applied here, but influence other settings, such as shares of
            the steps.

    Raises:
        UsageError: there is no such source, or the configuration has no keys.
    """
    if source not in SOURCES:
        raise UsageError(f"there is no source {source!r}: there is {', '.join(SOURCES)}{did_you_mean(source, SOURCES)}")
    values = dict(flattened(_plain(config)))
    known = _parsed(overrides)
    if source == "verl":
        return verl.convert(values, known)
    return trl.convert(values, source.removeprefix("trl-"), known)


def _parsed(overrides: Sequence[str]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in overrides]
    return {name.strip(): value_of(value.strip()) for name, _, value in pairs}


def _plain(config: Any) -> dict[str, Any]:
    # OmegaConf writes a missing value as "???". Enumerations occur in TRL's dataclasses.
    values = as_mapping(config, missing_ok=True)
    return {key: getattr(value, "value", value) for key, value in _without_missing(values).items()}


def _without_missing(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _without_missing(value) for key, value in values.items() if not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    return isinstance(value, str) and value == "???"
