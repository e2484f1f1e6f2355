"""Exact match of the text."""

from __future__ import annotations

import string
import unicodedata

from rlmesh.rl.types import Score

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: object, *, normalise: bool = True, score: float = 1.0) -> Score:
    """Compare a response with the right text.

    Args:
        solution_str: the response.
        ground_truth: the right text, or a list of texts of which any is right.
        normalise: compare without case, punctuation, articles and superfluous white space, as SQuAD does (Rajpurkar et
            al. 2016, arXiv:1606.05250).
        score: the score of a right answer; a wrong one has 0.
    """
    rights = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    texts = {_normalised(str(text)) if normalise else str(text) for text in rights}
    answer = _normalised(solution_str) if normalise else solution_str
    return Score(score, answer=answer) if answer in texts else Score(0.0, reason="wrong answer", answer=answer)


def _normalised(text: str) -> str:
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(" " if letter in string.punctuation else letter for letter in plain)
    words = plain.split()
    # If only articles are left, they are the answer: "A" may be the letter of a choice.
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)
