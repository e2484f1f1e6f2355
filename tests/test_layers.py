"""The architecture as a test: who may import whom, which modules may need torch, how large a module may be."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "rlmesh"
LAUNCHER = ROOT / "launcher" / "rlmesh_launcher"

LAYERS = (
    ("rlmesh.drafts", "rlmesh.errors", "rlmesh.private_files", "rlmesh.sqlite_files"),
    ("rlmesh.memory",),
    ("rlmesh.wire",),
    ("rlmesh.runtime",),
    ("rlmesh.job",),
    ("rlmesh.placement",),
    ("rlmesh.observe",),
    ("rlmesh.agent",),
    ("rlmesh.master",),
    ("rlmesh.run_directory",),
    ("rlmesh.rendezvous",),
    ("rlmesh.driver",),
    ("rlmesh.builders",),
    ("rlmesh.weights",),
    ("rlmesh.rl", "rlmesh.envs", "rlmesh.testing", "rlmesh_launcher"),
    ("rlmesh.tune",),
    ("rlmesh.cli",),
)
"""From the bottom up; a package imports from its own layer's packages and from those below."""


NOT_FROM_INSIDE = ("rlmesh.cli", "rlmesh.testing", "rlmesh_launcher")
"""Packages for whoever stands outside; no module of the library needs them to work."""
MAY_IMPORT_THEM = ("rlmesh.cli", "rlmesh.testing", "rlmesh_launcher")

HEAVY = {
    "torch": (
        "rlmesh.rl", "rlmesh.envs", "rlmesh.weights", "rlmesh.wire", "rlmesh.runtime", "rlmesh.agent",
        "rlmesh.memory.cuda", "rlmesh.tune.execution",
    ),
    "transformers": ("rlmesh.rl",),
    "datasets": ("rlmesh.rl",),
    "numpy": ("rlmesh.rl", "rlmesh.envs", "rlmesh.weights", "rlmesh.wire", "rlmesh.runtime"),
    "matplotlib": ("rlmesh.observe.run_report", "rlmesh.tune.curves"),
    "PIL": ("rlmesh.envs.recording",),
    "imageio_ffmpeg": ("rlmesh.envs.recording",),
    "optuna": ("rlmesh.tune.search",),
    "pandas": ("rlmesh.tune.analysis",),
    "tensorboard": (),
    "omegaconf": ("rlmesh.rl.trainers",),
    "minari": ("rlmesh.envs.offline",),
    "gymnasium": ("rlmesh.envs", "rlmesh.cli.commands.train"),
    "pettingzoo": (),
    "vllm": ("rlmesh.rl.engines",),
    "deepspeed": ("rlmesh.rl.engines.training", "rlmesh.weights.zero_source"),
    "pynvml": ("rlmesh.placement.machine.nvml",),
    "wandb": ("rlmesh.observe.trackers",),
    "mlflow": ("rlmesh.observe.trackers",),
    "trackio": ("rlmesh.observe.trackers",),
    "prometheus_client": ("rlmesh.master.monitoring.metrics_page",),
}  # fmt: skip
"""What a login node may lack, and the packages or modules that may import it."""

MAY_IMPORT_EACH_OTHER = {
    (
        "rlmesh.builders.job_builder",
        "rlmesh.builders.role_builder",
    ): "one chain describes a job: each returns the other",
    ("rlmesh.runtime.group", "rlmesh.runtime.group_views"): "RoleGroup.options() has the types of its own subclasses",
    (
        "rlmesh.envs.batches.sample_batch",
        "rlmesh.envs.batches.multi_agent_batch",
    ): "batches of one kind are joined to, and turned into, batches of the other",
    ("rlmesh.envs.algorithms",): "settings make their algorithm, whose steps and checkpoints take it as an argument",
    ("rlmesh.rl.trainers", "rlmesh.rl.evaluation"): "a run makes the trainer that runs it, and that validates",
}
"""Modules, or packages, whose imports of each other form a cycle, and why; none of these imports runs at a start."""

SAME_NAME = {"Algorithm", "PPO"}
"""Classes of `rlmesh.rl` and of `rlmesh.envs`: both words are the field's, and RLlib's users look for them."""

MAX_LINES = 500
MAX_MODULES = 15
AIM_LINES = 300
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}


@dataclass(frozen=True)
class Import:
    module: str
    imports: str
    line: int
    at_top: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.imports}"


def modules() -> dict[str, Path]:
    found = {}
    for base in (LIBRARY, LAUNCHER):
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    yield from _walk(ast.parse(path.read_text()), module, package, at_top=True, typing_only=False)


def _walk(node: ast.AST, module: str, package: str, *, at_top: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, at_top, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Import(module, full if full in MODULES else base, child.lineno, at_top, typing_only)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            then, otherwise = ast.Module(child.body, []), ast.Module(child.orelse, [])
            yield from _walk(then, module, package, at_top=at_top, typing_only=True)
            yield from _walk(otherwise, module, package, at_top=at_top, typing_only=typing_only)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, module, package, at_top=at_top and not inside, typing_only=typing_only)


MODULES = modules()


@cache
def imports() -> list[Import]:
    """All imports of the library and the launcher, once for all tests of this file."""
    return [each for module, path in MODULES.items() for each in imports_of(module, path)]


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer_of(module: str) -> int | None:
    return next((level for level, packages in enumerate(LAYERS) if within(module, packages)), None)


def test_every_module_has_a_layer() -> None:
    assert [module for module in MODULES if module != "rlmesh" and layer_of(module) is None] == []


def test_imports_point_down() -> None:
    wrong = []
    for each in imports():
        importer, imported = layer_of(each.module), layer_of(each.imports)
        if importer is not None and imported is not None and imported > importer:
            wrong.append(str(each))
    assert wrong == []


def test_no_imports_form_a_cycle() -> None:
    """Imports inside functions and those for type checkers count too."""
    below: dict[str, set[str]] = {module: set() for module in MODULES}
    for each in imports():
        known = any(within(each.module, group) and within(each.imports, group) for group in MAY_IMPORT_EACH_OTHER)
        if each.imports in MODULES and each.imports != each.module and not known:
            below[each.module].add(each.imports)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(f"each of these is imported by the next: {' → '.join(error.args[1])}")


def test_nobody_inside_imports_what_is_for_the_outside() -> None:
    wrong = [
        str(each)
        for each in imports()
        if within(each.imports, NOT_FROM_INSIDE) and not within(each.module, MAY_IMPORT_THEM)
    ]
    assert wrong == []


def test_the_package_itself_imports_nothing_but_types() -> None:
    """``import rlmesh`` is free: its names are found when they are asked for."""
    inside = [e for e in imports() if e.module == "rlmesh" and e.at_top and not e.typing_only]
    assert [str(each) for each in inside if within(each.imports, ("rlmesh",)) and each.imports != "rlmesh"] == []


@pytest.mark.parametrize("layer", ["rlmesh.rl", "rlmesh.envs"])
def test_the_layers_for_training_use_public_names_only(layer: str) -> None:
    wrong = [
        str(each)
        for each in imports()
        if within(each.module, (layer,))
        and within(each.imports, ("rlmesh", "rlmesh_launcher"))
        and not within(each.imports, (layer,))
        and each.imports not in ("rlmesh", *LAYERS[0])
    ]
    assert wrong == []


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_packages_are_imported_only_where_they_are_needed(name: str) -> None:
    wrong = [str(e) for e in imports() if within(e.imports, (name,)) and not within(e.module, HEAVY[name])]
    assert wrong == []


@pytest.mark.parametrize("name", ["torch", "numpy", "transformers", "datasets", "matplotlib"])
def test_outside_the_rl_layer_heavy_packages_are_imported_inside_functions(name: str) -> None:
    wrong = [
        str(each)
        for each in imports()
        if within(each.imports, (name,))
        and not within(
            each.module, ("rlmesh.rl", "rlmesh.envs", "rlmesh.weights.cuda.triton_kernels", "rlmesh.memory.cuda")
        )
        and each.at_top
        and not each.typing_only
    ]
    assert wrong == []


def test_the_guardian_needs_the_standard_library_only() -> None:
    """It runs as ``python -I -S``, without site-packages, and must start within milliseconds."""
    its_own = (
        "rlmesh.agent.processes.guardian", "rlmesh.agent.processes.ownership", "rlmesh.agent.processes.control_groups",
        "rlmesh.agent.processes.stopped", "rlmesh.private_files", "rlmesh.drafts",
    )  # fmt: skip
    top = [each for each in imports() if each.module in its_own and each.at_top and not each.typing_only]
    assert top
    neighbours = {"ownership", "control_groups", "private_files", "drafts", "stopped"}  # so a script finds them
    allowed = {*sys.stdlib_module_names, *neighbours}
    wrong = [e for e in top if e.imports not in its_own and e.imports.partition(".")[0] not in allowed]
    assert [str(each) for each in wrong] == []


def test_folders_stay_small() -> None:
    folders = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MAX_MODULES} == {}


def test_class_names_are_unique() -> None:
    found = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1 + (name in SAME_NAME)] == []


def test_modules_stay_small() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    large = {module: count for module, count in sorted(lines.items(), key=lambda i: -i[1]) if count > AIM_LINES}
    for module, count in large.items():
        print(f"{count:5} lines  {module}")
    assert {module: count for module, count in large.items() if count > MAX_LINES} == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [module for module in MODULES if EMPTY_NAMES & set(module.split("."))] == []


def test_the_library_prints_only_where_it_speaks_to_people() -> None:
    # The trainer is a member of the job: its standard output is the output of the run, with the samples of its rewards.
    speaks = (
        "rlmesh.cli", "rlmesh.observe", "rlmesh_launcher", "rlmesh.rl.trainers.trainer", "rlmesh.rl.rewards.scoring",
        "rlmesh.rl.trainers.run", "rlmesh.tune",
    )  # fmt: skip
    wrong = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        if not within(module, speaks)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == []
