"""The documents agree with what is there: links, files, options, make targets, and the list of decisions."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from rlmesh.cli.main import build_parser
from rlmesh_launcher.sbatch_options import SBATCH_OPTIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
SOURCES = sorted(
    path
    for folder in ("rlmesh", "launcher", "examples", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
OF_OTHERS = {
    "--gpus-per-node",
    "--gpus-per-task",
    "--het-group",
    "--kill-on-bad-exit",
    "--wait",
    "--scope",
    "--user",
    "--args",
    "--collect-only",
    "--network-check",
    "--node-check",
    "--precheck",
} | {f"--{option}" for option in SBATCH_OPTIONS}
"""Options of Slurm's, systemd's, pytest's and DLRover's commands, and of scripts that pages speak of."""


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:rlmesh|tests|benchmarks|examples|launcher|docs)/[\w./-]+)", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_that_sources_name_exist() -> None:
    named = {(names(path), page) for path in SOURCES for page in re.findall(r"docs/[\w./-]+\.md", path.read_text())}
    assert named
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= options_of(command)
    return found


def test_options_that_pages_speak_of_exist() -> None:
    known = options_of(build_parser()) | OF_OTHERS
    of_examples = re.findall(
        r"(\w+): \w+ = setting\(", "".join(p.read_text() for p in ROOT.glob("examples/*/config.py"))
    )
    scripts = "".join(path.read_text() for path in [*SOURCES, *PAGES] if "add_argument" in path.read_text())
    known |= {f"--{name}" for name in of_examples} | set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', scripts))
    for page in PAGES:
        said = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
        assert {option for option in said - known if option.replace("_", "-") not in known} == set(), names(page)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_make_targets_exist(page: Path) -> None:
    rules = "".join(path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("*/*.mk"), *ROOT.glob("tests/*/*.mk")])
    wanted = re.findall(r"(?:`|^)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    assert [target for target in wanted if not re.search(rf"^{target}:", rules, re.MULTILINE)] == []


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    index = re.findall(r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    there = []
    for path in sorted(folder.glob("[0-9]*.md")):
        number, _, title = path.read_text().splitlines()[0].removeprefix("# ").partition(" ")
        there.append((number.rstrip(":"), path.name, title))
        assert path.name.startswith(f"{number.rstrip(':')}-")
    assert index == there
    assert len({number for number, _, _ in there}) == len(there)
