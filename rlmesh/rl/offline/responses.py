"""Groups of episodes from rows of the data that contain the responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh.errors import UsageError
from rlmesh.rl.algorithms.protocol import Responses
from rlmesh.rl.data.loader import Drawn, PromptLoader
from rlmesh.rl.roles.reward import conversation_ids
from rlmesh.rl.types import Episode, Group, Turn

__all__ = ["COLUMNS", "OfflineBuffer", "offline_groups", "response_texts"]

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "given": ("response",), "pairs": ("chosen", "rejected"), "ranked": ("chosen", "rejected"),
}  # fmt: skip
"""The columns that have the responses, by kind."""


def response_texts(row: Mapping[str, Any], kind: Responses) -> list[str]:
    """The responses of a row, from its columns or from ``extra_info``. Each is a text, or a list of messages that ends
    with the response.

    Raises:
        UsageError: the row lacks a response; the message names the columns.
    """
    extra = row.get("extra_info")
    found = []
    for column in COLUMNS[kind]:
        value = row.get(column)
        if value is None and isinstance(extra, Mapping):
            value = extra.get(column)
        if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[-1], Mapping):
            value = value[-1].get("content")
        if not isinstance(value, str):
            raise UsageError(
                f"a row has no text as {column!r}, which the algorithm learns from; its columns are {', '.join(row)}"
            )
        found.append(value)
    return found


class OfflineBuffer:
    """The groups of a run whose responses are in the data. The groups of a step follow from its number.

    Args:
        groups: function from prompts to groups.
        loader: the prompts.
    """

    def __init__(self, groups: Callable[[Sequence[Drawn]], list[Group]], loader: PromptLoader) -> None:
        self._groups, self._loader = groups, loader

    def take(self, step: int) -> list[Group]:
        """The groups of a step."""
        return self._groups(self._loader.batch(step - 1))

    def connect(self, *args: Any, **options: Any) -> None:
        """Connects nothing: the responses are in the data."""

    def pause(self) -> None:
        """Pauses nothing: no engine samples."""

    def trained(self, step: int) -> None:
        """Frees nothing: a batch has no slots."""

    def advance(self, version: int) -> None:
        """Passes the version to nobody: no engine serves weights."""

    def report(self) -> dict[str, float]:
        """Empty: there are no metrics."""
        return {}

    def close(self) -> None:
        """Closes nothing: the ledger is for sampled responses."""


def offline_groups(
    drawn: Sequence[Drawn], tokenizer: Any, kind: Responses, most_tokens: int, key: str = "prompt",
    pad: int | None = None,
) -> list[Group]:  # fmt: skip
    """One group per prompt, with the responses of its row; longer responses are cut. The two responses of a ``ranked``
    pair are in two groups: they are part of the prompts, which must be equal in a group.

    Args:
        drawn: prompts with their rows.
        tokenizer: a tokenizer of transformers.
        kind: the kind of responses that the algorithm needs.
        most_tokens: the most tokens of a response.
        key: the column of the prompts.
        pad: the padding token of a ``ranked`` pair's reward model; None: it has none.
    """
    found = []
    for one in drawn:
        row, texts = one.prompt.row, response_texts(one.prompt.row, kind)
        if kind == "ranked":
            episodes = [_ranked(one, text, tokenizer, most_tokens, key, pad) for text in texts]
        else:
            episodes = [_episode(one, text, tokenizer, most_tokens, key) for text in texts]
        parts = [(episode,) for episode in episodes] if kind == "ranked" else [tuple(episodes)]
        found += [Group(one.key, part, row) for part in parts]
    return found


def _episode(one: Drawn, text: str, tokenizer: Any, most_tokens: int, key: str) -> Episode:
    prompt = one.prompt.ids.tolist()
    ids = _response_ids(one.prompt.row[key], prompt, text, tokenizer)
    return Episode((Turn.said(prompt), _given(ids[:most_tokens])), "length" if len(ids) > most_tokens else "stop")


def _ranked(one: Drawn, text: str, tokenizer: Any, most_tokens: int, key: str, pad: int | None) -> Episode:
    """A conversation whose value counts at the token at which the reward model is read when it scores: a classifier of
    transformers is read at its last token that is no padding, and the end token often is the padding token."""
    whole = conversation_ids(tokenizer, one.prompt.row[key], text)
    most = len(one.prompt.ids) + most_tokens
    cut, ids = len(whole) > most, whole[:most]
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    # Targets have the value before them, so a further token is added.
    return Episode((Turn.said(ids), _given([ids[-1]])), "length" if cut else "stop")


def _given(ids: Sequence[int]) -> Turn:
    """A turn that is trained on as if the policy had sampled it, with log-probabilities of 0 in place of real ones."""
    count = len(ids)
    return Turn(np.asarray(ids, np.int32), "policy", np.zeros(count, np.float32), version_spans=((0, 0, count),))


def _response_ids(prompt: Any, prompt_ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """The tokens of a response, up to the end token, which is added if it is missing."""
    whole = conversation_ids(tokenizer, prompt, text)
    if whole[: len(prompt_ids)] == prompt_ids and len(whole) > len(prompt_ids):
        ids = whole[len(prompt_ids) :]
    else:  # the tokenizer merged the end of the prompt with the beginning of the response
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    if end is None:
        return ids
    return ids[: ids.index(end) + 1] if end in ids else [*ids, end]
