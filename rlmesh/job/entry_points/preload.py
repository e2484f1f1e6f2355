"""Which modules to import once per node, before processes are forked to become workers.

The sources of the entry points, and the local modules that they import at their top level, are read for
imports of libraries that are slow to import and safe to fork after. Nothing is imported here.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import rlmesh
from rlmesh.job.entry_points.entry import Resolved
from rlmesh.job.entry_points.source_scan import absolute_name, import_root, lazy_source, module_file, top_level

__all__ = ["HEAVY", "MAX_MODULES", "find_preload"]

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
"""Libraries worth importing before the fork. Never those that start threads or processes, or look for a GPU,
when they are imported: vllm, sglang, grpc, deepspeed, ray, tensorflow, jax."""

_NAMES_ON_DEMAND = frozenset({"transformers"})
"""Libraries whose import is cheap and whose names are loaded when they are first used."""

MAX_MODULES = 300
"""Local modules that are read at most; a job with more gets what was found until then."""


def find_preload(entries: Sequence[Resolved]) -> tuple[str, ...]:
    """What the entry points import that is worth importing ahead, in the order in which it was found.

    An item is a module (``torch``) or a name in one (``transformers:Qwen2ForCausalLM``).
    """
    items: dict[str, None] = {}
    seen: set[Path] = set()
    pending: deque[tuple[str, Path]] = deque()
    roots = {entry.root for entry in entries if entry.root is not None} | {_own_root()}
    for entry in entries:
        if entry.file is not None and entry.file.is_file():
            pending.append((entry.entry.module or "__main__", entry.file))
    while pending and len(seen) < MAX_MODULES:
        module, path = pending.popleft()
        if path in seen:
            continue
        seen.add(path)
        for name, attribute in _imports_of(path):
            items.update(dict.fromkeys(_heavy_items(name, attribute)))
            pending.extend(_local_modules(absolute_name(name, module, path), attribute, roots))
    return tuple(items)


def _own_root() -> Path:
    return Path(rlmesh.__path__[0]).resolve().parent


def _heavy_items(module: str, attribute: str) -> Iterator[str]:
    top = module.partition(".")[0]
    if top not in HEAVY:
        return
    yield top
    if top in _NAMES_ON_DEMAND and attribute and module == top:
        yield f"{top}:{attribute}"


def _local_modules(module: str, attribute: str, roots: set[Path]) -> Iterator[tuple[str, Path]]:
    """The local modules that importing ``attribute`` (or nothing) from ``module`` executes."""
    parts = module.split(".")
    names = [".".join(parts[: depth + 1]) for depth in range(len(parts))] if module else []
    if attribute and module:
        names.append(f"{module}.{attribute}")  # it may be a submodule
    for name in names:
        try:
            path = module_file(name)
        except (ImportError, ValueError):
            continue
        if path is not None and import_root(name, path) in roots:
            yield name, path
            source, attribute_there = lazy_source(path, attribute) if name == module else ("", "")
            if source:
                yield from _local_modules(absolute_name(source, name, path), attribute_there, roots)


def _imports_of(path: Path) -> tuple[tuple[str, str], ...]:
    try:
        status = path.stat()
        return _read_imports(path, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError):
        return ()  # the worker will report it, with its traceback


@lru_cache(maxsize=1024)
def _read_imports(path: Path, _mtime_ns: int, _size: int) -> tuple[tuple[str, str], ...]:
    """``(module, name)`` of every import at the top level; the name is empty for ``import module``.

    Uses such as ``transformers.AutoTokenizer`` count as imports of that name.
    """
    tree = ast.parse(path.read_bytes(), filename=str(path))
    found: dict[tuple[str, str], None] = {}
    on_demand: dict[str, str] = {}
    for node in top_level(tree, type_checking=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.name, ""] = None
                if alias.name in _NAMES_ON_DEMAND:
                    on_demand[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = "" if alias.name == "*" else alias.name
                found["." * node.level + (node.module or ""), name] = None
    for used in ast.walk(tree) if on_demand else ():
        if isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name) and used.value.id in on_demand:
            found[on_demand[used.value.id], used.attr] = None
    return tuple(found)
