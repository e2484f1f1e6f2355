"""A `Run` from a file: YAML or JSON with the keys of `Run`, or a Python file that defines ``run``.

The folder of the file is put on ``sys.path``, as Python does for a script, so that ``module:function`` finds modules
beside the file.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmesh.errors import UsageError, import_fault
from rlmesh.rl.faults import similar_path
from rlmesh.rl.trainers.config_reader import read_run
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import apply_overrides

__all__ = ["load_run", "read_values", "settings_fault"]

SUFFIXES = (".yaml", ".yml", ".json", ".py")


def load_run(config: Any, overrides: Sequence[str] = (), *, look: bool = False) -> Run:
    """Read a run from a file, or from values.

    Args:
        config: a path, or what :func:`rlmesh.rl.trainers.config_reader.read_run` takes.
        overrides: ``section.key=value`` texts, which replace values of ``config``.
        look: if there is a fault, check the model's folder and the data files too, so that one message has all faults.

    Raises:
        UsageError: lists all faults.
    """
    if isinstance(config, (str, Path)):
        path = _existing(Path(config))
        if path.suffix == ".py":
            _find_modules_beside(path)
            return apply_overrides(_of_python(path), overrides)
        config = read_values(path)
    run, faults = read_run(config, overrides, look=look)
    if run is None:
        raise settings_fault(faults)
    return run


def read_values(path: Path) -> Any:
    """The keys and values of a YAML or JSON file; modules beside the file can be imported from now on.

    Raises:
        UsageError: the file cannot be read, or holds no keys.
    """
    path = _existing(path)
    _find_modules_beside(path)
    return _yaml(path) if path.suffix in (".yaml", ".yml") else _json(path)


def settings_fault(faults: Sequence[str]) -> UsageError:
    """The error that lists all faults of settings."""
    count = "one setting is wrong" if len(faults) == 1 else f"{len(faults)} settings are wrong"
    return UsageError("\n  ".join([f"{count}, and nothing was started:", *faults]))


def _find_modules_beside(path: Path) -> None:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _existing(path: Path) -> Path:
    path = path.expanduser()
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: a configuration is a file with the suffix {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UsageError(f"there is no file {path}{similar_path(path)}")
    return path


def _yaml(path: Path) -> Any:
    # OmegaConf reads 1e-6 as a number (YAML 1.1 reads a text), and refuses a key that occurs twice.
    try:
        from omegaconf import DictConfig, OmegaConf
    except Exception as error:  # a broken installation may raise anything
        fault = import_fault("omegaconf", error, "rlmesh[config]")
        raise UsageError(f"{path}: YAML needs OmegaConf: {fault}. Or write JSON") from error
    try:
        found = OmegaConf.load(path)
    except Exception as error:  # errors of PyYAML, of OmegaConf and of the file
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, DictConfig):
        raise UsageError(f"{path} must hold keys with values, it holds a list")
    return found


def _json(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_keys_once)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold an object with keys, it holds {type(found).__name__}")
    return found


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which the later of two equal keys would silently count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _of_python(path: Path) -> Run:
    """The ``run`` that a Python file defines.

    The file is imported under its own name and not run as ``__main__``: workers can import its functions, and a block
    under ``if __name__ == "__main__":`` does not run.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if path.stem in sys.modules or spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported: a module {path.stem!r} exists already; rename the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    words, sys.argv = sys.argv, [str(path)]
    try:
        spec.loader.exec_module(module)
    except UsageError:
        raise
    except Exception as error:
        where = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(path)]
        raise UsageError(f"{path}:{where[-1] if where else 1}: {type(error).__name__}: {error}") from error
    finally:
        sys.argv = words
    found = getattr(module, "run", None)
    if not isinstance(found, Run):
        others = [name for name, value in vars(module).items() if isinstance(value, Run)]
        said = f"its run is {type(found).__name__}" if found is not None else "it defines no run"
        raise UsageError(f"{path}: {said}; write run = Run(…)" + (f" instead of {others[0]}" if others else ""))
    return found
