"""The program that compares two checkouts: its statistics, and what it reads."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compare  # noqa: E402
from compare import Figure, Pairs, collect, difference, is_worse, rows_of, t_95, table  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def test_the_quantiles_of_students_t() -> None:
    """From tables."""
    for degrees, quantile in ((1, 12.706), (9, 2.262), (30, 2.042), (40, 2.021), (60, 2.000), (120, 1.980)):
        assert t_95(degrees) == pytest.approx(quantile, abs=0.001)


def test_a_difference_and_its_interval_are_those_worked_by_hand() -> None:
    """Worked by hand: logarithms 0.1, 0.2, 0.3 have the mean 0.2 and the deviation 0.1."""
    found = difference([0.1, 0.2, 0.3])
    assert found is not None
    half = 4.303 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(math.exp(0.2) - 1)
    assert found.low == pytest.approx(math.exp(0.2 - half) - 1) and found.high == pytest.approx(
        math.exp(0.2 + half) - 1
    )
    assert difference([0.1, 0.2]) is None


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    draw = random.Random(7)
    true = math.log(1.02)
    held = 0
    for _ in range(2000):
        found = difference([draw.gauss(true, 0.05) for _ in range(10)])
        assert found is not None
        held += found.low <= 0.02 <= found.high
    assert 0.935 <= held / 2000 <= 0.965


def pairs(before: list[float], after: list[float], better: str = "lower") -> Pairs:
    return Pairs("s", better, before, after)


@pytest.mark.parametrize(("row", "verdict"), [
    (pairs([100, 101, 99, 100], [110, 111, 109, 110]), "slower by more than 3 %"),
    (pairs([110, 111, 109, 110], [100, 101, 99, 100]), "faster"),
    (pairs([110, 111, 109, 110], [100, 101, 99, 100], "higher"), "slower by more than 3 %"),
    (pairs([100, 101, 99, 100], [100, 100.5, 99.5, 100]), "not slower"),
    (pairs([100, 101, 99, 100], [80, 125, 90, 140]), "undecided: more pairs"),
    (pairs([100, 100, 100, 100], [102, 102.1, 101.9, 102]), "not slower"),
])  # fmt: skip
def test_a_difference_has_the_verdict_of_its_pairs(row: Pairs, verdict: str) -> None:
    found = difference(row.slower)
    assert found is not None and found.verdict == verdict
    assert is_worse({"r": row}) == (verdict == "slower by more than 3 %")
    assert verdict in table({"r": row})


def test_noise_that_both_have_counts_for_nothing() -> None:
    """Pairs, not two heaps: a machine whose speed doubles meanwhile hides no difference of 5 %."""
    speeds = [1.0, 1.3, 1.7, 2.0, 1.1, 1.9]
    found = difference(pairs([s * 10 for s in speeds], [s * 10.5 for s in speeds]).slower)
    assert found is not None and found.low == pytest.approx(0.05) and found.high == pytest.approx(0.05)


def test_rows_of_all_programs_are_read() -> None:
    text = "\n".join([
        '{"row": "echo", "value": 96.5, "unit": "µs", "better": "lower", "peer": "rlmesh"}',
        '{"row": "pipelined", "value": 10000, "unit": "calls/s", "better": "higher"}',
        '{"row": "death", "value": null, "error": "it hung"}',
        '{"what": "7B in bf16", "seconds": 0.25, "floor_s": 0.2}',
        '{"simple_role_away_s": 0.05, "others_unchanged": true, "calls_per_s": 9.5}',
        "zygote warm to all 8 members serving            0.93 s   goal 2.00 s",
        "group of 2, gloo:      0.112 s away (goal 0.5 s), worst 0.2",
        "[1, 2]", "no figure", "",
    ])  # fmt: skip
    assert rows_of(text) == {
        "echo": Figure(96.5, "µs"),
        "pipelined": Figure(10000, "calls/s", "higher"),
        "7B in bf16": Figure(0.25, "s"),
        "simple_role_away_s": Figure(0.05, "s"),
        "calls_per_s": Figure(9.5, "", "higher"),
        "zygote warm to all 8 members serving": Figure(0.93, "s"),
        "group of 2, gloo": Figure(0.112, "s"),
    }


def test_what_has_no_ratio_is_left_out() -> None:
    before = {"a": Figure(1.0), "b": Figure(0.0), "c": Figure(2.0)}
    rows = collect([(before, {"a": Figure(2.0), "b": Figure(1.0)}), (before, before)])
    assert {name: (row.before, row.after) for name, row in rows.items()} == {
        "a": ([1.0, 1.0], [2.0, 1.0]),
        "c": ([2.0], [2.0]),
    }
    assert "fewer than 3 pairs" in table(rows) and not is_worse(rows)


def test_runs_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old", "new"):
        (tmp_path / name / "rlmesh").mkdir(parents=True)
        (tmp_path / name / "rlmesh" / "__init__.py").touch()
    turns: list[str] = []

    def measure(program: object, checkout: Path, limit_s: float) -> dict[str, Figure]:
        turns.append(checkout.name)
        return {"echo": Figure(100.0 if checkout.name == "old" else 120.0 + len(turns) / 100, "µs")}

    monkeypatch.setattr(compare, "measure", measure)
    sides = ["--before", str(tmp_path / "old"), "--after", str(tmp_path / "new")]
    assert compare.main([*sides, "--pairs", "4", "--json", str(tmp_path / "out")]) == 1
    assert turns[:2] == ["old", "new"], "the runs that compile the modules are not counted"
    assert turns[2:] == ["old", "new", "new", "old", "old", "new", "new", "old"]
    assert "slower by more than 3 %" in capsys.readouterr().out
    assert '"before": [100.0, 100.0, 100.0, 100.0]' in (tmp_path / "out").read_text()
    assert compare.main(["--before", str(tmp_path), "--after", str(tmp_path / "new"), "--pairs", "4"]) == 2
    assert "is this a checkout of it?" in capsys.readouterr().err
