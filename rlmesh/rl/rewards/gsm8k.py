"""GSM8K: grade-school word problems whose answer stands after ``####`` (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

from typing import Literal

from rlmesh.rl.rewards.numbers import first_number, last_number, to_fraction
from rlmesh.rl.types import Score

__all__ = ["compute_score"]

MARKER = "####"


def compute_score(
    solution_str: str, ground_truth: object, method: Literal["strict", "flexible"] = "strict", score: float = 1.0
) -> Score:
    """Compare the answer of a response with the right one, as exact numbers.

    Args:
        solution_str: the response.
        ground_truth: the right number, or a text that is one.
        method: ``strict`` takes the number after the last ``####``; ``flexible`` takes that, or else the last number of
            the response.
        score: the score of a right answer; a wrong one has 0.

    Returns:
        the score; ``reason`` says why it is 0: ``"no answer"`` or ``"wrong answer"``.

    Raises:
        ValueError: the ground truth is no number, or the method is unknown.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be 'strict' or 'flexible', got {method!r}")
    truth = to_fraction(ground_truth)
    _, marker, after = solution_str.rpartition(MARKER)
    answer = first_number(after) if marker else None
    if answer is None and method == "flexible":
        answer = last_number(solution_str)
    if answer is None:
        return Score(0.0, reason="no answer")
    if answer == truth:
        return Score(score, answer=str(answer))
    return Score(0.0, reason="wrong answer", answer=str(answer))
