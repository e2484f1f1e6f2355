"""Checks of an engine's inputs before sampling: prompts against the model's vocabulary, and parameters. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.engines.rollout import SamplingParams

__all__ = ["checked_params", "checked_rows", "end_tokens", "vocabulary_of"]

MOST_FAULTS = 5


def checked_rows(rows: object, vocabulary: int | None, *, what: str) -> list[list[int]]:
    """Convert rows to lists of token ids, of at least one token each. If an object is several rows in succession, these
    rows are one list.

    Args:
        rows: lists, tuples, arrays or tensors of whole numbers.
        vocabulary: number of tokens, which ids must be below; None: unknown.
        what: "prompt" or "sequence", for the text of the error.

    Raises:
        UsageError: rows are no lists of token ids; the message names these rows and their faults.
    """
    given = rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        raise UsageError(f"{what}s are a list with a list of token ids for each, not {given!r:.80} ({_type(given)})")
    found: list[list[int]] = []
    faults = []
    before: Any = None
    tokens, fault = list[int](), ""
    for number, row in enumerate(given):
        # The samples of a group have one row. It is compared, since a generator may change the list that it yields.
        if not (row is before and isinstance(row, list) and row and row == tokens):
            before, (tokens, fault) = row, _checked(row, vocabulary)
        found.append(tokens)
        if fault:
            faults.append(f"{what} {number} {fault}")
    if faults:
        more = f"; {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise UsageError(f"of {len(found)} {what}s, {'; '.join(faults[:MOST_FAULTS])}{more}. Nothing was sampled")
    return found


def _checked(row: Any, vocabulary: int | None) -> tuple[list[int], str]:
    """The tokens of a row, and its fault (empty: none)."""
    if hasattr(row, "tolist"):
        row = row.tolist()
    if isinstance(row, str | bytes | dict) or not isinstance(row, Sequence):
        return [], f"is {row!r:.60} ({_type(row)}), not a list of token ids"
    if not row:
        return [], "is empty: give it at least one token, such as the one that begins a text"
    if set(map(type, row)) == {int}:
        tokens = list(row)
    else:
        tokens = []
        for place, token in enumerate(row):
            try:
                if isinstance(token, bool):
                    raise TypeError
                tokens.append(index(token))
            except (TypeError, ValueError):
                return [], f"has {token!r:.60} ({_type(token)}) at place {place}, which is no token id"
    if min(tokens) < 0:
        place = next(place for place, token in enumerate(tokens) if token < 0)
        return [], f"has the negative id {tokens[place]} at place {place}"
    if vocabulary is not None and max(tokens) >= vocabulary:
        place = next(place for place, token in enumerate(tokens) if token >= vocabulary)
        return [], f"has id {tokens[place]} at place {place}, beyond the vocabulary of {vocabulary} tokens"
    return tokens, ""


def checked_params(params: object, *, can_decode: bool = True) -> SamplingParams:
    """Check the parameters of a request, and return them.

    Raises:
        UsageError: these are no `SamplingParams`, or they have stop texts and the engine cannot decode.
    """
    if not isinstance(params, SamplingParams):
        raise UsageError(f"params are SamplingParams(max_tokens=…), not {params!r:.80} ({_type(params)})")
    if params.stop and not can_decode:
        raise UsageError(
            f"stop={params.stop!r}: the engine has no tokenizer to find texts with. Make it with tokenizer=…, or give "
            "stop_token_ids"
        )
    return params


def vocabulary_of(model: Any) -> int | None:
    """The number of tokens for which the model has embeddings; None: unknown."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a response, from the model's configuration."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return list(ends) if isinstance(ends, list | tuple) else [int(ends)]
    return []


def _type(value: object) -> str:
    return type(value).__name__
