"""Definitions in Python source, read without importing it.

``build()`` runs on login nodes, where a role's imports may be missing or slow. So entry points are found with the
import
system's own finders and read with ``ast``. No module is executed, not even a package's ``__init__``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from rlmesh.job.entry_points.program import STARTED_IN

__all__ = [
    "Callee",
    "ModuleFacts",
    "absolute_name",
    "find_spec",
    "import_root",
    "lazy_source",
    "module_file",
    "read_module",
    "siblings",
    "top_level",
]


@dataclass(frozen=True, slots=True)
class Callee:
    """A class or a function at the top level of a module.

    ``required`` are the arguments without default of the function, or of the class's own ``__init__``.
    ``bases`` are the names of the base classes as they are written.
    """

    kind: str
    name: str
    line: int
    required: tuple[str, ...] = ()
    methods: frozenset[str] = frozenset()
    bases: tuple[str, ...] = ()


@dataclass(slots=True)
class ModuleFacts:
    """The definitions at a module's top level.

    ``imported`` maps a local name to its module and its name there (empty: the module itself). ``opaque``: the module
    may
    have names that its source does not show: star imports, ``__getattr__``.
    """

    path: Path
    callees: dict[str, Callee] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    assigned: dict[str, int] = field(default_factory=dict)
    opaque: bool = False

    @property
    def names(self) -> set[str]:
        return {*self.callees, *self.imported, *self.assigned}


def find_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module, without importing its parent packages."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = next((found for found in _finders(name, path) if found is not None), None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    return spec


def _finders(name: str, path: Sequence[str] | None) -> Iterator[ModuleSpec | None]:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None:
            yield find(name, path)


def module_file(module: str) -> Path | None:
    """Return the source file of a module, or ``None`` if there is no such module or it has no Python source."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None and module != "__main__":
        spec = find_spec(module)
        file = spec.origin if spec is not None and spec.has_location else None
    return Path(STARTED_IN, file).resolve() if file and str(file).endswith(".py") else None


def import_root(module: str, path: Path) -> Path:
    """Return the folder that must be on ``sys.path`` for ``module`` to be imported from ``path``."""
    depth = 0 if module == "__main__" else module.count(".") + (path.name == "__init__.py")
    return path.parents[depth]


def absolute_name(source: str, module: str, path: Path) -> str:
    """Return the absolute module of ``from source import …`` inside ``module``; ``source`` may start with dots."""
    level = len(source) - len(source.lstrip("."))
    if level == 0:
        return source
    parts = module.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    kept = package[: len(package) - level + 1]
    return ".".join([*kept, *filter(None, [source.lstrip(".")])])


def siblings(module: str) -> list[str]:
    """Return names of modules near the missing ``module``: in its package, or next to the submitting script."""
    parent, _, _ = module.rpartition(".")
    if parent:
        spec = find_spec(parent)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    else:
        folders = [entry for entry in sys.path if entry and "-packages" not in entry][:2]
    prefix = f"{parent}." if parent else ""
    found: set[str] = set()
    for folder in map(Path, folders):
        if folder.is_dir():
            found.update(prefix + p.stem for p in folder.glob("*.py") if p.stem != "__init__")
            found.update(prefix + p.parent.name for p in folder.glob("*/__init__.py"))
    return sorted(found)


def read_module(path: Path) -> ModuleFacts:
    """Return the definitions in a file.

    Raises:
        SyntaxError, OSError: the file cannot be read.
    """
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=512)
def _read(path: Path, _mtime_ns: int, _size: int) -> ModuleFacts:
    facts = ModuleFacts(path)
    for node in top_level(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.ClassDef):
            facts.callees[node.name] = _class(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__getattr__":
                facts.opaque = True
            facts.callees[node.name] = Callee("function", node.name, node.lineno, _required(node.args))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                facts.imported[bound] = (alias.name if alias.asname else bound, "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    facts.opaque = True
                else:
                    dots = "." * node.level + (node.module or "")
                    facts.imported[alias.asname or alias.name] = (dots, alias.name)
        else:
            for target in _targets(node):
                facts.assigned[target] = node.lineno
    return facts


def lazy_source(path: Path, attribute: str) -> tuple[str, str]:
    """Return from which module, and by which name there, a module imports ``attribute`` when it is first used.

    Such a module has ``__getattr__``, and shows these imports to type checkers, in ``if TYPE_CHECKING:``. Both texts
    are empty for other names.
    """
    try:
        facts = read_module(path)
    except (OSError, SyntaxError, ValueError):
        return "", ""
    return facts.imported.get(attribute, ("", "")) if "__getattr__" in facts.callees else ("", "")


def top_level(tree: ast.Module, *, type_checking: bool = True) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported, including those inside ``if``, ``try`` and ``with``.

    With ``type_checking=False`` the body of ``if TYPE_CHECKING:`` is left out.
    """
    pending: list[ast.stmt] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        yield node
        inner: list[ast.stmt] = []
        if isinstance(node, ast.If):
            if type_checking or not _is_type_checking(node.test):
                inner += node.body
            inner += node.orelse
        elif isinstance(node, ast.Try):
            inner += [*node.body, *(s for h in node.handlers for s in h.body), *node.orelse, *node.finalbody]
        elif isinstance(node, ast.With):
            inner += node.body
        pending.extend(reversed(inner))


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _targets(node: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        for leaf in ast.walk(target):
            if isinstance(leaf, ast.Name):
                yield leaf.id


def _class(node: ast.ClassDef) -> Callee:
    methods = {s.name: s for s in node.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)}
    init = methods.get("__init__")
    required = _required(init.args)[1:] if init is not None else ()
    bases = tuple(ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases)
    return Callee("class", node.name, node.lineno, required, frozenset(methods), bases)


def _required(arguments: ast.arguments) -> tuple[str, ...]:
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    needed = positional[: len(positional) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return (*needed, *(a.arg for a, default in pairs if default is None))
