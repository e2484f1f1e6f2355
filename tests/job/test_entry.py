"""Entry points: every accepted form, looked up without importing, and what is said about wrong ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlmesh.job.entry_points.entry import EntryPoint, entry_text
from rlmesh.job.entry_points.resolving import resolve_entry
from tests.job import roles

HERE = "tests.job.roles"
FILE = Path(roles.__file__)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ((f"{HERE}.Plain",), f"{HERE}.Plain"),
        ((f" {HERE}:Plain ",), f"{HERE}.Plain"),
        ((f"{HERE}::Plain",), f"{HERE}.Plain"),
        (((HERE, "Plain"),), f"{HERE}.Plain"),
        ((HERE, "Plain"), f"{HERE}.Plain"),
        ((roles.Plain,), f"{HERE}.Plain"),
        ((roles.main,), f"{HERE}.main"),
        (("train.py --lr 1",), "train.py --lr 1"),
        (("-m package.module --lr 1",), "-m package.module --lr 1"),
    ],
)
def test_every_form_of_an_entry_point_becomes_text(form: tuple[Any, ...], text: str) -> None:
    assert entry_text(*form) == text


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ((3,), r"3 \(int\) is not an entry point: give a class, a function, 'module.Class' or a script"),
        ((lambda: None,), "is a lambda, where workers cannot import it"),
        ((roles.Outer.Inner,), "'Outer.Inner' of module tests.job.roles is defined inside 'Outer'"),
        ((("a", "b", "c"),), r"must be \(module, class\), two strings"),
        ((roles.Plain, "Plain"), "two arguments must be module and class"),
    ],
)
def test_forms_that_cannot_work(form: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entry_text(*form)


def test_a_local_class_cannot_be_imported_by_workers() -> None:
    class Local: ...

    with pytest.raises(ValueError, match="move it to the top level of a module"):
        entry_text(Local)


@pytest.mark.parametrize(
    ("name", "kind", "runs"),
    [
        ("Plain", "class", False),
        ("Runner", "class", True),
        ("Child", "class", True),
        ("Trainer", "class", True),
        ("Actor", "class", False),
        ("TakesDefaults", "class", True),
        ("main", "function", True),
    ],
)
def test_a_name_in_a_module_is_found_without_an_import(name: str, kind: Any, runs: bool) -> None:
    found = resolve_entry(f"{HERE}.{name}")
    assert found.problems == ()
    assert found.entry == EntryPoint(kind, HERE, name)
    assert found.runs is runs
    assert found.file == FILE
    assert found.root == FILE.parents[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("Plain", "'Plain' is neither 'module.Class' nor 'module.function' nor a script"),
        ("{P}.ppo_actor.Actor", "holds a brace: is the f of an f-string missing?"),
        (f"{HERE}.Plane", "defines no 'Plane'. Did you mean 'Plain'?"),
        (f"{HERE}.SETTINGS", "is a variable; an entry point must be a class or a function"),
        ("tests.job.role.Plain", "no Python module 'tests.job.role' in its package. Did you mean 'tests.job.roles'?"),
        ("no_such_package.module.Plain", "no Python module 'no_such_package' on sys.path"),
        (f"{HERE}.NeedsArguments", "requires arguments (config, lr), but entry points are called without any"),
        (f"{HERE}.main_with_arguments", "main_with_arguments() ("),
        ("no_such_script.py --lr 1", "there is no script"),
        ("'unfinished", "cannot be split into a script and its arguments"),
        ("-m no_such_package", "no Python module 'no_such_package'"),
        ("-m tests.job", "package tests.job cannot be run"),
    ],
)
def test_a_wrong_entry_point_has_one_problem(text: str, message: str) -> None:
    problems = resolve_entry(text).problems
    assert len(problems) == 1
    assert message in problems[0]


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "unimportable"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "roles.py").write_text("import no_such_library\nclass Actor(no_such_library.Base): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = resolve_entry("unimportable.roles.Actor")
    assert found.problems == ()
    assert found.entry == EntryPoint("class", "unimportable.roles", "Actor")
    assert found.runs is None
    assert found.root == tmp_path
    assert "unimportable" not in sys.modules


def test_names_are_followed_through_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "followed"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .inner import Actor as Policy\nfrom .inner.base import *\n")
    (package / "inner" / "__init__.py").write_text("from .actor import Actor\n")
    (package / "inner" / "base.py").write_text("class Base:\n    def run(self): ...\n")
    (package / "inner" / "actor.py").write_text("from ..inner.base import Base\nclass Actor(Base[int]): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = resolve_entry("followed.Policy")
    assert (found.entry, found.problems, found.runs) == (EntryPoint("class", "followed", "Policy"), (), True)
    assert resolve_entry("followed.Unseen").problems == ()  # a star import may define it


def test_a_file_that_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_source.py").write_text("class Actor(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "broken_source.py cannot be read" in resolve_entry("broken_source.Actor").problems[0]


def test_a_script_is_an_entry_point_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hi')\n")
    monkeypatch.chdir(tmp_path)
    for text in ("train.py --name 'two words' {x}", "./train.py --name 'two words' {x}"):
        found = resolve_entry(text)
        assert found.problems == ()
        assert found.entry == EntryPoint("script", script=str(script), args=("--name", "two words", "{x}"))
        assert (found.runs, found.root) == (True, tmp_path)
    assert "has train.py" in resolve_entry("tran.py").problems[0]


def test_modules_that_are_run_as_scripts() -> None:
    found = resolve_entry("-m json.tool --sort-keys")
    assert found.problems == ()
    assert found.entry == EntryPoint("script", module="json.tool", args=("--sort-keys",))
    assert found.root is None
