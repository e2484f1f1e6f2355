"""MATH and its like: answers in LaTeX, compared as mathematics by ``math-verify``.

Needs ``pip install rlmesh[rewards]``. The library compares by SymPy, which can take long on odd expressions: run it in
a :class:`rlmesh.rl.rewards.process_pool.ScoringPool`, whose deadline ends what hangs.
"""

from __future__ import annotations

from rlmesh.rl.types import Score

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: object, score: float = 1.0) -> Score:
    """Compare the last boxed or stated answer of a response with the right one.

    Args:
        solution_str: the response.
        ground_truth: the right answer, as LaTeX or plain text, with or without ``\\boxed{}``.
        score: the score of a right answer; a wrong one has 0.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: no mathematics can be read from the ground truth.
    """
    from math_verify import parse, verify

    text = str(ground_truth)
    # The library's own deadlines use SIGALRM, which works on main threads only; the process pool has deadlines instead.
    truth = parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)
    if not truth:
        raise ValueError(f"no mathematics can be read from the ground truth {text!r}")
    answer = parse(solution_str, parsing_timeout=None)
    if not answer:
        return Score(0.0, reason="no answer")
    if verify(truth, answer, timeout_seconds=None):
        return Score(score, answer=str(answer[0]))
    return Score(0.0, reason="wrong answer", answer=str(answer[0]))
