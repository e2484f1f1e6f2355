"""Code and tables of the pages about training agree with what is there."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")

from rlmesh.rl import group_advantages, kl, losses  # noqa: E402
from rlmesh.rl.algorithms import GRPO, Evaluated  # noqa: E402
from rlmesh.rl.algorithms.choices import KLEstimator, Level  # noqa: E402
from rlmesh.rl.algorithms.grpo import PRESETS, Advantage, Loss  # noqa: E402
from rlmesh.rl.faults import keys_of, unknown_key  # noqa: E402
from rlmesh.rl.roles.actor import ActorRole  # noqa: E402
from rlmesh.rl.trainers.named import ALGORITHMS  # noqa: E402
from rlmesh.rl.trainers.other_names import ELSEWHERE  # noqa: E402
from rlmesh.rl.trainers.run import Run  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("training.md", "algorithms.md", "coming-from.md")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def rows(page: str) -> list[list[str]]:
    lines = re.findall(r"^\| (.+) \|$", (DOCS / page).read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


class MyActor(ActorRole):
    """A class of the reader's own, which pages speak of."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page of one's own algorithm as the module that its settings name, with the names that pages speak of."""
    made = ModuleType("my_algorithms")
    run = Run.from_config({"model": "m", "data": "d", "rewards": ["exact"], "algorithm": "grpo"})
    vars(made).update(run=run, MyActor=MyActor)
    monkeypatch.setitem(sys.modules, "my_algorithms", made)
    return made


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str, module: ModuleType) -> None:
    for block in blocks(page, "python"):
        if "import hydra" in block:
            pytest.importorskip("hydra")
        exec(compile(block, page, "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES)
def test_settings_of_a_page_are_right(page: str, module: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("omegaconf")
    test_code_of_a_page_runs(page, module)
    found = blocks(page, "yaml")
    assert found
    for number, block in enumerate(found):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        assert Run.from_config(path).model == "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_page_shows_the_example() -> None:
    assert blocks("training.md", "python")[0] == (DOCS.parent / "examples" / "grpo.py").read_text()


def batch() -> Evaluated:
    mask = torch.tensor([[False, True, True], [False, True, False], [False, True, True], [False, True, True]])
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    return Evaluated(
        mask=mask, groups=torch.tensor([0, 0, 1, 1]), rewards=torch.tensor([1.0, 0.0, 0.5, float("nan")]).double(),
        valid=torch.tensor([True, True, True, False]), log_probs=zeros, sampled_log_probs=zeros,
    )  # fmt: skip


def test_the_algorithm_of_ones_own_is_short_and_right(module: ModuleType) -> None:
    (block,) = blocks("algorithms.md", "python")
    test_code_of_a_page_runs("algorithms.md", module)
    weights = module.BetterHalf(samples=2, imitate=0.2).weigh(batch())
    better = torch.tensor([True, False, False, False])
    assert (weights.policy == (better.unsqueeze(1) & batch().mask)).all()
    assert torch.allclose(weights.likelihood, 0.2 * weights.policy)
    assert weights.advantages[0, 1] > 0 and torch.isfinite(weights.advantages).all()
    assert (weights.normalisers.policy, weights.metrics["better"]) == (2.0, 0.25)
    again = module.BetterHalf(samples=2).weigh(replace(batch(), rewards=batch().rewards + 5))
    assert torch.allclose(again.policy, weights.policy)
    assert len(block.split("class BetterHalf")[1].splitlines()) <= 20


def test_the_tables_of_algorithms_are_complete() -> None:
    first = {re.sub(r"[`\"]", "", row[0]) for row in rows("algorithms.md")}
    for names in (get_args(Advantage), get_args(Loss), get_args(KLEstimator), get_args(Level)):
        assert set(names) <= first
    text = (DOCS / "algorithms.md").read_text()
    assert all(f"`{name}`" in text for name in ALGORITHMS)
    losses_table = {row[0].strip("`"): row[2] for row in rows("algorithms.md") if len(row) == 5 and "mean" in row[2]}
    for name, preset in PRESETS.items():
        if preset.aggregation != "constant":
            assert losses_table[name] == preset.aggregation


def test_papers_are_those_of_the_functions() -> None:
    sources = "".join(str(module.__doc__) for module in (group_advantages, kl, losses))
    sources += "".join(path.read_text() for path in (DOCS.parent / "rlmesh" / "rl").glob("*.py"))
    sources += "".join(path.read_text() for path in (DOCS.parent / "rlmesh" / "rl" / "algorithms").glob("*.py"))
    linked = set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", (DOCS / "algorithms.md").read_text()))
    assert linked and {paper for paper in linked if paper not in sources} == set()


def test_names_of_other_libraries_are_in_the_page() -> None:
    table = [row for row in rows("coming-from.md") if len(row) == 4]
    listed = {
        (name, row[0].strip("`")) for row in table for cell in row[1:] for name in re.findall(r"`([\w.]+)`", cell)
    }
    assert {pair for pair in ELSEWHERE.items() if pair not in listed} == set()
    sections: dict[str, Any] = dict(keys_of(Run)) | {"algorithm": tuple(vars(GRPO()))}
    settings = [row[0].strip("`") for row in table if not re.match(r"`?[A-Z]|rlmesh|-", row[0])]
    for ours in settings:
        section, _, key = ours.rpartition(".")
        assert key in sections[section], ours


def test_the_error_about_a_name_of_another_library_suggests_the_name_in_the_page() -> None:
    found: dict[str, set[str]] = {}
    for ours, *cells in (row for row in rows("coming-from.md") if len(row) == 4):
        if re.match(r"`[a-z]", ours):
            for name in re.findall(r"`([\w.]+)`", " ".join(cells)):
                found.setdefault(name, set()).add(ours.strip("`"))
    del found["accelerate"]  # a program with a configuration of its own
    # Some files name the algorithm, whose settings are then known.
    for sections in (dict(keys_of(Run)), dict(keys_of(Run)) | {"algorithm": tuple(vars(GRPO()))}):
        known = {f"{section}.{key}".lstrip(".") for section, keys in sections.items() for key in keys}
        for name, settings in found.items():
            error = unknown_key(name, sections)
            assert name in known or any(f"did you mean {ours}?" in error for ours in settings), error
        assert unknown_key("temperature", sections).endswith(
            "rollout.temperature? There is evaluation.temperature too."
        )
