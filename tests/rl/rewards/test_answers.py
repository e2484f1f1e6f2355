from __future__ import annotations

import time
from fractions import Fraction

import pytest

from rlmesh.rl.rewards import exact, gsm8k, math
from rlmesh.rl.rewards.numbers import first_number, last_number, to_fraction

STRICT = [
    ("#### 1,234", "1234", 1),
    ("#### 1234.00", "1234", 1),
    ("#### 72.", "72", 1),
    ("#### $18", "18", 1),
    ("#### -3", "-3", 1),
    ("#### −3", "-3", 1),
    ("#### +5", "5", 1),
    ("#### 3", "-3", 0),
    ("#### 18\n#### 20", "18", 0),
    ("#### 42" + " and so on" * 40, "42", 1),
    ("#### 18 dollars", "18", 1),
    ("####18", "18", 1),
    ("#### 1/2", "0.5", 1),
    ("", "1", 0),
    ("#### -$3", "-3", 1),
    ("#### $-3", "-3", 1),
    (r"#### \$1,000,000", "1000000", 1),
    ("#### **7**", "7", 1),
    ("#### 50%", "50", 1),
    ("#### .5", "0.5", 1),
    ("#### 12,34", "12", 1),  # no thousands: the number ends at the comma
    ("#### twelve", "12", 0),
    ("#### 1/0", "1", 0),
]


@pytest.mark.case("O24")
@pytest.mark.parametrize(("response", "truth", "expected"), STRICT)
def test_gsm8k_answers_are_found_and_compared(response: str, truth: str, expected: int) -> None:
    assert gsm8k.compute_score(response, truth).value == expected
    assert gsm8k.compute_score(response, truth, score=0.5).value == expected / 2


@pytest.mark.case("O24")
def test_an_answer_without_marker_counts_where_the_method_is_flexible() -> None:
    strict = gsm8k.compute_score("answer is 18", "18")
    assert (strict.value, strict.reason) == (0, "no answer")
    assert gsm8k.compute_score("answer is 18", "18", method="flexible").value == 1
    assert gsm8k.compute_score("total $1,234.00.", "1234", method="flexible").value == 1
    assert gsm8k.compute_score("#### 5 is not 7", "5", method="flexible").value == 1
    assert gsm8k.compute_score("", "1", method="flexible").reason == "no answer"
    assert gsm8k.compute_score("#### 4", "5").reason == "wrong answer"


@pytest.mark.case("O24")
@pytest.mark.parametrize("unit", ["1", "1,", "12 ", "#", "#### ", "-", "1/", ".1", "$ "])
def test_long_responses_are_scored_at_once(unit: str) -> None:
    response = unit * (100_000 // len(unit))
    for method in ("strict", "flexible"):
        best = min(_seconds(response, method) for _ in range(3))
        assert best < 0.05


def _seconds(response: str, method: str) -> float:
    began = time.process_time()
    gsm8k.compute_score(response, "1", method=method)  # type: ignore[arg-type]
    return time.process_time() - began


def test_a_sign_after_a_number_is_an_operator() -> None:
    assert last_number("10-3") == 3 and last_number("10 - 3 = 7") == 7 and last_number("it is -3") == -3
    assert last_number("no number") is None and first_number("so 3") is None


@pytest.mark.parametrize("truth", [None, True, "", "many", "3 or 4", "1/0"])
def test_a_ground_truth_that_is_no_number_is_refused(truth: object) -> None:
    with pytest.raises(ValueError, match="the ground truth must be a number"):
        gsm8k.compute_score("#### 1", truth)


def test_ground_truths_are_numbers_of_any_type() -> None:
    assert to_fraction(0.1) == Fraction(1, 10) and to_fraction(7) == 7 and to_fraction(" 1,000 ") == 1000
    with pytest.raises(ValueError, match="'strict' or 'flexible'"):
        gsm8k.compute_score("#### 1", "1", method="loose")  # type: ignore[arg-type]


def test_an_exact_match_counts_after_normalisation() -> None:
    assert exact.compute_score("The answer.", "answer").value == 1
    assert exact.compute_score("the answer", "answer", normalise=False).value == 0
    assert exact.compute_score("Paris", ["London", "paris"]).value == 1
    assert exact.compute_score("Rome", "Paris").reason == "wrong answer"


def test_an_article_may_be_the_answer() -> None:
    assert exact.compute_score("A.", "A").value == exact.compute_score("(a)", "A").value == 1
    for wrong in ("", "the", "B", "an"):
        assert exact.compute_score(wrong, "A").value == 0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"So $\boxed{\frac{1}{2}}$", r"\frac{1}{2}", 1),
        (r"So $\boxed{0.5}$", r"\frac{1}{2}", 1),
        (r"It is $\boxed{3}$, no: $\boxed{4}$", "4", 1),
        (r"$\boxed{x^2 + 2x + 1}$", "(x+1)^2", 1),
        (r"$\boxed{-3}$", "3", 0),
        (r"$\boxed{(1, 2)}$", "(1,2)", 1),
        (r"$\boxed{(2, 1)}$", "(1,2)", 0),
        ("no idea", "4", 0),
        (r"\boxed{2x + 3}", "2x+3", 1),
        (r"\boxed{2}", "2x+3", 0),
        (r"\boxed{11\sqrt{2}}", r"11\sqrt{2}", 1),
        (r"\boxed{11}", r"11\sqrt{2}", 0),
        (r"\boxed{2\pi}", r"2\pi", 1),
        (r"\boxed{2}", r"2\pi", 0),
        (r"\boxed{1, 2}", "1,2", 1),
        (r"\boxed{-2}", r"\pm 2", 0),
        (r"\boxed{7\frac{1}{2}}", r"7\frac{1}{2}", 1),
        (r"\boxed{\frac{1}{2}}", r"7\frac{1}{2}", 0),
        (r"\boxed{x \geq 2}", r"x \geq 2", 1),
        (r"\boxed{0}", r"0.\overline{3}", 0),
        (r"\boxed{10}", r"10\%", 1),
        (r"10%", "10%", 1),
        (r"\boxed{3\text{ cm}}", "3", 1),
        (r"\boxed{4}", "The answer is 4", 1),
        (r"\boxed{1}. Wait, I made a mistake: \boxed{2}", "2", 1),
        (r"\boxed{1}. Wait, I made a mistake: \boxed{2}", "1,2", 0),
        (r"\boxed{1} and \boxed{2}", "1,2", 1),
        (r"\boxed{\boxed{7}}", "7", 1),
    ],
)
def test_math_answers(response: str, truth: str, expected: int) -> None:
    pytest.importorskip("math_verify")
    found = math.compute_score(response, truth)
    assert found.value == expected
    assert found.reason == ("" if expected else "no answer" if response == "no idea" else "wrong answer")
    with pytest.raises(ValueError, match="no mathematics can be read from the ground truth ''"):
        math.compute_score(response, "")
