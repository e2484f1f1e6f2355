"""The settings of a run, in its directory: for ``rlmesh evaluate RUN`` after the training's script has ended.

Functions of the script travel by value, those of modules by name, with the folders in which these were found. Loading a
pickle can run code, so the file is refused if another user can have written it.
"""

from __future__ import annotations

import logging
import pickle
import site
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from rlmesh import private_files
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["SETTINGS_FILE", "load_saved_run", "remember", "save_run"]

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.pickle"
_SCRIPT = "__mp_main__"
"""The name under which workers import the script of a job."""


def save_run(run_dir: Path, run: Run) -> None:
    """Write the settings.

    Raises:
        OSError: the file cannot be written.
        TypeError, pickle.PicklingError: a setting cannot be pickled.
    """
    script = sys.modules.get(_SCRIPT)
    if script is not None:
        cloudpickle.register_pickle_by_value(script)
    try:
        content = pickle.dumps({"folders": _own_folders(), "run": cloudpickle.dumps(run)})
    finally:
        if script is not None:
            cloudpickle.unregister_pickle_by_value(script)
    private_files.write_whole(run_dir / SETTINGS_FILE, content, secret=True, durable=False)


def remember(run_dir: Path, run: Run) -> None:
    """Write the settings, or log why they cannot be written: a training does not need the file."""
    try:
        save_run(run_dir, run)
    except Exception as error:  # pickling a user's object may raise anything
        logger.warning("the settings of the run are not kept for rlmesh evaluate (%s: %s)", type(error).__name__, error)


def load_saved_run(run_dir: Path) -> Run:
    """The settings of the run in a directory.

    Raises:
        UsageError: there are none, or they cannot be loaded, or another user may have written them.
    """
    from rlmesh.rl.trainers.run import Run

    path = run_dir / SETTINGS_FILE
    advice = f"give the configuration and the model: rlmesh evaluate CONFIG --model {run_dir / 'model'}"
    try:
        content = private_files.read(path)
    except FileNotFoundError:
        raise UsageError(f"{run_dir} has no {SETTINGS_FILE}, so it is no directory of a Run; {advice}") from None
    except OSError as error:
        raise UsageError(f"{path} is not read: {error}") from error
    try:
        saved = pickle.loads(content)
        sys.path += [folder for folder in saved["folders"] if folder not in sys.path]
        run = pickle.loads(saved["run"])
    except Exception as error:  # importing a user's modules may raise anything
        raise UsageError(f"{path} cannot be loaded ({type(error).__name__}: {error}); {advice}") from error
    if not isinstance(run, Run):
        raise UsageError(f"{path} holds {type(run).__name__}, not the settings of a Run; {advice}")
    return run


def _own_folders() -> list[str]:
    """The folders on ``sys.path`` that belong to no installation."""
    paths: dict[str, Any] = sysconfig.get_paths()
    installed = {str(Path(one).resolve()) for one in [*paths.values(), *site.getsitepackages()]}
    every = [str(Path(one).resolve()) for one in sys.path if one]
    return [one for one in every if Path(one).is_dir() and not any(_within(one, base) for base in installed)]


def _within(path: str, base: str) -> bool:
    return path == base or path.startswith(f"{base}/")
