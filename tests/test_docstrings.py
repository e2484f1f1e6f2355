"""First lines of docstrings say what a thing is or does: the subject comes first, and is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "rlmesh", ROOT / "launcher" / "rlmesh_launcher")
MOST = 0.01
"""The share of first lines that may open otherwise."""

PRONOUNS = {
    "what", "whatever", "who", "whoever", "whom", "whose", "which", "whichever", "whether", "where", "wherever",
    "when", "how", "why", "if", "it", "its", "they", "them", "their", "theirs", "he", "she", "this", "that",
    "these", "those", "one", "ones", "both", "either", "neither", "each", "every", "all", "another", "other",
    "others", "some", "somebody", "someone", "something", "any", "anybody", "anyone", "anything", "no",
    "nobody", "nothing", "none", "everybody", "everything",
}  # fmt: skip
NOUN_MAY_FOLLOW = {
    "its", "their", "this", "that", "these", "those", "one", "both", "either", "neither", "each", "every", "all",
    "another", "other", "some", "any", "no", "if",
}  # fmt: skip
"""Determiners: pronouns only where a verb, a preposition or another pronoun follows."""
NO_NOUN = re.compile(
    r"(of|that|which|who|whom|whose|is|are|was|were|has|have|had|does|do|did|can|may|must|will|what|it|they|for|in|on|"
    r"at|to|from|by|with|without|as|and|or|but|not|here|there|more|less|before|after)\b|[,.:;—–]"
)


def opens_with_a_pronoun(line: str) -> bool:
    match = re.match(r"([A-Za-z]+)\s*(.*)", line)
    if match is None or match[1].lower() not in PRONOUNS:
        return False
    return match[1].lower() not in NOUN_MAY_FOLLOW or NO_NOUN.match(match[2]) is not None


def first_lines() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                text = None
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                if text:
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    yield place, text.splitlines()[0].strip()
                for below, line in strings_below_names(node):
                    yield f"{path.relative_to(ROOT)}:{line}", below.splitlines()[0].strip()


def strings_below_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Docstrings of constants and attributes: strings that follow an assignment."""
    if not isinstance(node, ast.Module | ast.ClassDef):
        return
    for before, after in zip(node.body, node.body[1:], strict=False):
        value = after.value if isinstance(after, ast.Expr) else None
        if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Constant):
            text = value.value
            if isinstance(text, str) and text:
                yield text, after.lineno


def is_a_riddle(line: str) -> bool:
    return opens_with_a_pronoun(line) or re.search(r"\?(\s|$)", line) is not None


def test_pronouns_are_recognised() -> None:
    for line in (
        "What a module had.", "Who may come in.", "It runs.", "Those of one node.", "All that a master needs.",
        "How a job ends.", "Whether it ends.", "One that starts here.", "This, and no other.", "Each of them.",
    ):  # fmt: skip
        assert opens_with_a_pronoun(line), line
    for line in (
        "The tensors of a module.", "All members of a role.", "This process's address.", "One bucket on its way.",
        "Each call gets a number.", "Members of one node.", "No member is left.",
    ):  # fmt: skip
        assert not opens_with_a_pronoun(line), line


def test_docstrings_open_with_their_subject() -> None:
    lines = list(first_lines())
    found = [f"{place}: {line}" for place, line in lines if is_a_riddle(line)]
    assert len(found) <= MOST * len(lines), f"{len(found)} of {len(lines)}:\n" + "\n".join(found)
