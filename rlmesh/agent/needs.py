"""Does a role need what the job preloads? Its sources are read for imports; nothing is imported.

The answer only decides how fast a worker starts. A role that needs none of it is forked at once, while the
preload is still under way; one that does waits for it. A wrong "no" costs that role its own import.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import rlmesh
from rlmesh.job.entry import Entry
from rlmesh.job.source import absolute_name, top_level

__all__ = ["needs_preload"]

logger = logging.getLogger(__name__)

QUICK = frozenset({"gymnasium", "numpy", "safetensors"})
"""Not worth waiting for if the preload list has slower ones."""

HEAVY_PARTS = ("rl", "envs", "weights")
"""Parts of rlmesh that import heavy libraries; the rest has only light ones."""

MAX_FILES = 300


def needs_preload(entry: Entry, main_path: str, roots: Sequence[str], preload: Sequence[str]) -> bool:
    """Whether importing the entry point imports something of the preload list.

    Installed packages that are not on the list count as needing it: they are not read. Local modules are those
    below ``roots``, next to the entry script, or on ``PYTHONPATH``.
    """
    listed = {item.partition(":")[0].partition(".")[0] for item in preload}
    wanted = listed - QUICK or listed
    if not wanted:
        return False
    start = _entry_file(entry, main_path)
    folders = [Path(root) for root in dict.fromkeys([*roots, *_local_paths(), *_folder_of(start)])]
    module = entry.module or "__main__"
    pending = deque([(module, start)] if start is not None else _files(module, folders))
    if not pending:
        return True  # an installed module, or one that does not exist: then nothing is lost by waiting
    seen: set[Path] = set()
    while pending and len(seen) < MAX_FILES:
        module, file = pending.popleft()
        if file in seen:
            continue
        seen.add(file)
        for name, attribute in _imports(file):
            absolute = absolute_name(name, module, file)
            verdict = _judge(absolute, attribute, wanted, folders)
            if verdict is True:
                logger.debug("%s imports %s: its workers wait for the preload", file, absolute)
                return True
            pending.extend(verdict or ())
    return False


def _judge(module: str, attribute: str, wanted: set[str], folders: Sequence[Path]) -> bool | list[tuple[str, Path]]:
    """True: needed. A list: local modules that the import executes."""
    top, _, rest = module.partition(".")
    if top in wanted:
        return True
    if top == "rlmesh":
        if (rest.partition(".")[0] or attribute) not in HEAVY_PARTS:
            return []
        folders = [Path(rlmesh.__path__[0]).parent]
    elif top in sys.stdlib_module_names or top in QUICK or not top:
        return []
    local = [*_files(module, folders), *_files(f"{module}.{attribute}", folders)]
    return local or not _is_namespace(top, folders)


def _entry_file(entry: Entry, main_path: str) -> Path | None:
    if entry.kind == "script" and entry.script:
        return Path(entry.script)
    if entry.module in ("__main__", "__mp_main__"):
        return Path(main_path)
    return None


def _folder_of(file: Path | None) -> list[str]:
    return [str(file.parent)] if file is not None else []


def _local_paths() -> Iterable[str]:
    return filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _files(module: str, folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """What importing a local module executes: its packages and itself, each with its file."""
    parts = module.split(".")
    for folder in folders:
        found = []
        for depth in range(1, len(parts) + 1):
            path = folder.joinpath(*parts[:depth])
            for file in (path / "__init__.py", path.with_name(path.name + ".py")):
                if file.is_file():
                    found.append((".".join(parts[:depth]), file))
                    break
        if found:
            return found
    return []


def _is_namespace(top: str, folders: Sequence[Path]) -> bool:
    return any((folder / top).is_dir() for folder in folders)


def _imports(file: Path) -> Sequence[tuple[str, str]]:
    try:
        status = file.stat()
        return _read(file, status.st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return ()  # the worker will report it, with its traceback


@lru_cache(maxsize=1024)
def _read(file: Path, _mtime_ns: int) -> Sequence[tuple[str, str]]:
    return tuple(_statements(ast.parse(file.read_bytes(), filename=str(file))))


def _statements(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in top_level(tree, type_checking=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield "." * node.level + (node.module or ""), alias.name
