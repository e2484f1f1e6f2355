"""Preloading of slow libraries: which ones a job's processes import before workers are forked, and which roles need
them.

One scanner reads sources for imports and follows them into local modules; nothing is imported. `find_preload` asks it,
when a job is submitted, which libraries the entry points import; `needs_preload` asks it, on a node, if a role needs
any of them.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rlmesh.job.entry_points.source_scan import absolute_name, import_root, lazy_source, top_level

if TYPE_CHECKING:
    from rlmesh.job.entry_points.entry import EntryPoint
    from rlmesh.job.entry_points.resolving import Resolved

__all__ = ["HEAVY", "MAX_MODULES", "find_preload", "needs_preload"]

logger = logging.getLogger(__name__)

HEAVY = frozenset(
    {
        "accelerate",
        "datasets",
        "gymnasium",
        "numpy",
        "pandas",
        "peft",
        "pyarrow",
        "safetensors",
        "scipy",
        "sklearn",
        "tokenizers",
        "torch",
        "transformers",
    }
)
"""Libraries worth importing before the fork. Libraries that start threads or processes at import, or look for a GPU,
must not be listed: vllm, sglang, grpc, deepspeed, ray, tensorflow, jax."""

_QUICK = frozenset({"gymnasium", "numpy", "safetensors"})
"""Libraries that are not worth waiting for if the preload list has slower ones."""

_NAMES_ON_DEMAND = frozenset({"transformers"})
"""Libraries whose import is cheap and whose names are loaded at their first use."""

_HEAVY_PARTS = ("rl", "envs", "weights")
"""Parts of rlmesh that import heavy libraries; the other parts import only light ones."""

_MODEL_ROLES = "rlmesh.rl.roles."
_FOR_MODELS = "transformers.modeling_utils"
"""Modules that roles with a language model import in their set-up, which takes each of them 1.5 s otherwise."""

MAX_MODULES = 300
"""Local modules that are read at most; the result then has the imports found so far."""


@dataclass(frozen=True, slots=True)
class Import:
    """An import of ``module``, or of ``attribute`` in it. ``at_top``: it runs when its module is imported."""

    module: str
    attribute: str
    at_top: bool


_Module = tuple[str, Path]
_Follow = Callable[[str, Import], Iterable[_Module] | None]


def find_preload(entries: Sequence[Resolved]) -> tuple[str, ...]:
    """The libraries that the entry points import and that are worth preloading, in the order of their imports.

    Follows imports at the top level of the entry points' modules and of local modules. An item is a module (``torch``)
    or a name in one (``transformers:Qwen2ForCausalLM``). A job with a built-in role that holds a language model also
    preloads what such models are made of.
    """
    items: dict[str, None] = {}
    roots = list({entry.root: None for entry in entries if entry.root is not None})

    def follow(module: str, found: Import) -> Iterable[_Module]:
        items.update(dict.fromkeys(_heavy_items(found.module, found.attribute)))
        if module.startswith(_MODEL_ROLES):
            items[_FOR_MODELS] = None
        top, _, rest = module.partition(".")
        if top != "rlmesh":
            return _local_files(module, found.attribute, roots)
        is_light = rest and rest.partition(".")[0] not in _HEAVY_PARTS
        return () if is_light else _local_files(module, found.attribute, [_own_root()])

    starts = ((e.entry.module or "__main__", e.file) for e in entries if e.file is not None and e.file.is_file())
    _scan(starts, follow, nested=False)
    return tuple(items)


def needs_preload(entry: EntryPoint, main_path: str, roots: Sequence[str], preload: Sequence[str]) -> bool:
    """True if the entry point's module, or a local module that it imports, imports a module of the preload list.

    The result only decides how fast a worker starts: a role that needs none of the list is forked at once, while
    the preload is still under way. A wrong False costs the role its own import.

    Imports inside functions count too, since ``setup()`` is where models are loaded. Installed packages are not
    read: one that is imported at the top of a module counts as needing the list. Local modules are those below
    ``roots``, next to the entry script, or on ``PYTHONPATH``.
    """
    listed = {item.partition(":")[0].partition(".")[0] for item in preload}
    wanted = listed - _QUICK or listed
    if not wanted:
        return False
    start = _entry_file(entry, main_path)
    paths = [*roots, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    folders = [Path(path) for path in dict.fromkeys(paths)] + ([start.parent] if start is not None else [])
    module = entry.module or "__main__"
    starts = [(module, start)] if start is not None else list(_local_files(module, "", folders))
    if not starts:
        return True  # an installed module, whose imports are unknown here, or one that does not exist: wait

    def follow(module: str, found: Import) -> Iterable[_Module] | None:
        top, _, rest = module.partition(".")
        if top in wanted:
            return None
        if top == "rlmesh":
            heavy = (rest.partition(".")[0] or found.attribute) in _HEAVY_PARTS
            return _local_files(module, found.attribute, [_own_root()]) if heavy else ()
        if top in sys.stdlib_module_names or top in _QUICK or not top:
            return ()
        local = list(_local_files(module, found.attribute, folders))
        is_namespace = any((folder / top).is_dir() for folder in folders)
        return None if not local and found.at_top and not is_namespace else local

    return not _scan(starts, follow, nested=True)


def _scan(starts: Iterable[_Module], follow: _Follow, *, nested: bool) -> bool:
    """Read modules and, breadth first, the local modules that ``follow`` returns for each of their imports.

    Args:
        follow: takes the absolute name of the imported module, and the import; returns None to end the scan.
        nested: also read imports inside functions.

    Returns:
        False if ``follow`` has ended the scan.
    """
    pending, seen = deque(starts), set[Path]()
    while pending and len(seen) < MAX_MODULES:
        module, path = pending.popleft()
        if path in seen:
            continue
        seen.add(path)
        imports = [(absolute_name(found.module, module, path), found) for found in _imports_of(path, nested)]
        for name, found in imports:
            local = follow(name, found)
            if local is None:
                logger.debug("%s imports %s: the scan ends", path, name)
                return False
            files = list(local)
            pending.extend(files)
            if (more := _on_demand(name, found, files)) is not None and more not in imports:
                imports.append(more)
    return True


def _on_demand(module: str, found: Import, files: Sequence[_Module]) -> tuple[str, Import] | None:
    """The import that a local module with ``__getattr__`` runs when the name is first used; None for other names."""
    path = next((path for name, path in files if name == module), None)
    source, attribute = lazy_source(path, found.attribute) if path is not None else ("", "")
    if path is None or not source:
        return None
    return absolute_name(source, module, path), Import(source, attribute, found.at_top)


def _own_root() -> Path:
    return import_root(__name__, Path(__file__).resolve())


def _entry_file(entry: EntryPoint, main_path: str) -> Path | None:
    if entry.kind == "script" and entry.script:
        return Path(entry.script)
    if entry.module in ("__main__", "__mp_main__"):
        return Path(main_path)
    return None


def _heavy_items(module: str, attribute: str) -> Iterator[str]:
    top = module.partition(".")[0]
    if top not in HEAVY:
        return
    yield top
    if top in _NAMES_ON_DEMAND and attribute and module == top:
        yield f"{top}:{attribute}"


def _local_files(module: str, attribute: str, folders: Sequence[Path]) -> Iterator[_Module]:
    """The local modules that importing ``attribute`` (or nothing) from ``module`` executes: its packages and itself."""
    parts = [*filter(None, module.split(".")), *filter(None, [attribute])]  # the attribute may be a submodule
    for folder in folders if module else ():
        found = False
        for depth in range(1, len(parts) + 1):
            path = folder.joinpath(*parts[:depth])
            for file in (path / "__init__.py", path.with_name(path.name + ".py")):
                if file.is_file():
                    found = True
                    yield ".".join(parts[:depth]), file
                    break
        if found:
            return


def _imports_of(path: Path, nested: bool) -> tuple[Import, ...]:
    try:
        status = path.stat()
        return _read_imports(path, nested, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError):
        return ()  # the worker will report the error, with its traceback


@lru_cache(maxsize=1024)
def _read_imports(path: Path, nested: bool, _mtime_ns: int, _size: int) -> tuple[Import, ...]:
    """The imports of a module: those at its top level, or, if ``nested``, all imports that may run in a worker.

    Uses such as ``transformers.AutoTokenizer`` count as imports of that name.
    """
    tree = ast.parse(path.read_bytes(), filename=str(path))
    top = {id(node): node for node in top_level(tree, type_checking=False)}
    nodes: list[ast.AST] = list(_nodes_in_worker(tree)) if nested else list(top.values())
    found: dict[Import, None] = {}
    on_demand: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[Import(alias.name, "", id(node) in top)] = None
                if alias.name in _NAMES_ON_DEMAND:
                    on_demand[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = "" if alias.name == "*" else alias.name
                found[Import("." * node.level + (node.module or ""), name, id(node) in top)] = None
    for used in ast.walk(tree) if on_demand else ():
        if isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name) and used.value.id in on_demand:
            found[Import(on_demand[used.value.id], used.attr, True)] = None
    return tuple(found)


def _nodes_in_worker(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes, except the blocks of ``if TYPE_CHECKING`` and ``if __name__ == "__main__"``."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.If) and _tests_type_checking_or_main(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def _tests_type_checking_or_main(test: ast.expr) -> bool:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    return bool(names & {"TYPE_CHECKING", "__name__"})
