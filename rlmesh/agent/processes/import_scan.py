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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import rlmesh
from rlmesh.job.entry_points.entry import EntryPoint
from rlmesh.job.entry_points.source_scan import absolute_name, lazy_source, top_level

__all__ = ["needs_preload"]

logger = logging.getLogger(__name__)

QUICK = frozenset({"gymnasium", "numpy", "safetensors"})
"""Not worth waiting for if the preload list has slower ones."""

HEAVY_PARTS = ("rl", "envs", "weights")
"""Parts of rlmesh that import heavy libraries; the rest has only light ones."""

MAX_FILES = 300


@dataclass(frozen=True, slots=True)
class Import:
    """``from module import attribute``; ``at_top``: it runs when the module is imported."""

    module: str
    attribute: str
    at_top: bool


def needs_preload(entry: EntryPoint, main_path: str, roots: Sequence[str], preload: Sequence[str]) -> bool:
    """Whether the entry point's module, or a local module that it imports, imports something of the list.

    Imports inside functions count too, since ``setup()`` is where models are loaded. Installed packages are not
    read: one that is imported at the top of a module counts as needing the list. Local modules are those below
    ``roots``, next to the entry script, or on ``PYTHONPATH``.
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
        for found in _imports(file):
            absolute = absolute_name(found.module, module, file)
            local = _follow(absolute, found, wanted, folders)
            if local is None:
                logger.debug("%s imports %s: its workers wait for the preload", file, absolute)
                return True
            pending.extend(local)
    return False


def _follow(module: str, found: Import, wanted: set[str], folders: Sequence[Path]) -> list[tuple[str, Path]] | None:
    """The local modules that an import executes; None if it needs the preload."""
    attribute = found.attribute
    top, _, rest = module.partition(".")
    if top in wanted:
        return None
    if top == "rlmesh":
        if (rest.partition(".")[0] or attribute) not in HEAVY_PARTS:
            return []
        folders = [Path(rlmesh.__path__[0]).parent]
    elif top in sys.stdlib_module_names or top in QUICK or not top:
        return []
    local = [*_files(module, folders), *_files(f"{module}.{attribute}", folders)]
    for name, file in _files(module, folders):
        source, _ = lazy_source(file, attribute) if name == module else ("", "")
        if source:
            local += _files(absolute_name(source, name, file), folders)
    unknown = not local and found.at_top and not _is_namespace(top, folders)
    return None if unknown else local


def _entry_file(entry: EntryPoint, main_path: str) -> Path | None:
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


def _imports(file: Path) -> Sequence[Import]:
    try:
        status = file.stat()
        return _read(file, status.st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return ()  # the worker will report it, with its traceback


@lru_cache(maxsize=1024)
def _read(file: Path, _mtime_ns: int) -> Sequence[Import]:
    tree = ast.parse(file.read_bytes(), filename=str(file))
    at_top = {id(node) for node in top_level(tree, type_checking=False)}
    return tuple(_found(tree, at_top))


def _found(tree: ast.Module, at_top: set[int]) -> Iterator[Import]:
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", id(node) in at_top)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import("." * node.level + (node.module or ""), alias.name, id(node) in at_top)
        elif isinstance(node, ast.If) and _runs_elsewhere(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def _runs_elsewhere(test: ast.expr) -> bool:
    """Whether it is ``TYPE_CHECKING`` or ``__name__ == "__main__"``, which are false in a worker."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    return bool(names & {"TYPE_CHECKING", "__name__"})
