"""MATH and its like: answers in LaTeX, compared as mathematics by ``math-verify``.

Needs ``pip install rlmesh[rewards]``. The library compares by SymPy, which can take long on odd expressions: run it in
a :class:`rlmesh.rl.rewards.process_pool.ScoringPool`, whose deadline ends what hangs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlmesh.rl.types import Score

__all__ = ["compute_score"]

BOX = r"\boxed{"
_OWN_ENVIRONMENT = re.compile(r"\\boxed\{|\\\(|\\\[|\$[^$]+\$")
_SENTENCE = re.compile(r"[A-Za-z]{3}")
_NUMBER = re.compile(r"[-+]?\\?\$?[\d,]*\.?\d+\s*(\\?%|\.)?")
_NEXT_BOX = re.compile(r"[\s$]*(?:,?\s*and|,?\s*or|,)[\s$]*")
"""The text between boxes that give several answers together."""


def compute_score(solution_str: str, ground_truth: object, score: float = 1.0) -> Score:
    """Compare the last boxed or stated answer of a response with the right one.

    Several boxes are one answer only if nothing but commas, "and" or "or" is between them.

    Args:
        solution_str: the response.
        ground_truth: the right answer, as LaTeX or plain text, with or without ``\\boxed{}``.
        score: the score of a right answer; a wrong one has 0.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: no mathematics can be read from the ground truth.
    """
    from math_verify import verify

    text = str(ground_truth).strip()
    truth = _truth(text)
    if not truth:
        raise ValueError(f"no mathematics can be read from the ground truth {text!r}")
    answer = _parsed(_last_boxed_only(solution_str))
    if not answer:
        return Score(0.0, reason="no answer")
    if verify(truth, answer, timeout_seconds=None):
        return Score(score, answer=str(answer[0]))
    return Score(0.0, reason="wrong answer", answer=str(answer[0]))


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    # The library's own deadlines use SIGALRM, which works on main threads only; the process pool has deadlines instead.
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _truth(text: str) -> list[Any]:
    """The values of a ground truth. In plain text, the library looks for numbers only: in ``2x+3`` it finds 2."""
    if not text:
        return []
    if _OWN_ENVIRONMENT.search(text):
        return _parsed(text) or _parsed(f"${text}$")
    if "\\" not in text and _SENTENCE.search(text):
        return _parsed(f"${text}$") or _parsed(text)
    boxed = _parsed(f"{BOX}{text}}}")
    if all(isinstance(one, str) for one in boxed) and (not boxed or _NUMBER.fullmatch(text)):
        return boxed + _parsed(f"${text}$")  # the library reads no percentages in boxes
    return boxed


def _last_boxed_only(text: str) -> str:
    """The text without the boxes around earlier answers: on one line, the library would take all boxes as one
    answer."""
    spans = [*_boxes(text)]
    first = len(spans) - 1
    while first > 0 and _NEXT_BOX.fullmatch(text, spans[first - 1][1], spans[first][0]):
        first -= 1
    for start, end in reversed(spans[: max(first, 0)]):
        text = text[:start] + text[start + len(BOX) : end - 1] + text[end:]
    return text


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each outer ``\\boxed{…}`` with balanced braces."""
    end = 0
    while (start := text.find(BOX, end)) >= 0:
        depth, end = 1, start + len(BOX)
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            yield start, end
