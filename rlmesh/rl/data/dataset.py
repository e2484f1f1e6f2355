"""`RLHFDataset`: prompts as token ids, with their rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh.errors import UsageError
from rlmesh.rl.data.chat import prompt_ids
from rlmesh.rl.data.files import Row, expand, read_rows

__all__ = ["Counts", "Prompt", "RLHFDataset"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
        ids: ``[tokens]``, int32.
        row: the data set's row.
        index: of the row among all rows that were read.
    """

    ids: NDArray[np.int32]
    row: Mapping[str, Any]
    index: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of rows that were read, were left out as too long or empty, and are left."""

    read: int
    too_long: int
    empty: int
    left: int

    def __str__(self) -> str:
        return f"{self.read} rows read, {self.too_long} too long, {self.empty} empty, {self.left} left"


class RLHFDataset:
    """Prompts of parquet, JSON-lines or JSON files; a sequence of `Prompt`.

    The column ``prompt`` is a text or a list of chat messages. Other columns are kept for rewards: ``data_source``,
    ``reward_model`` (with ``ground_truth``), ``extra_info``, and any others.

    All rows are tokenised when the data set is made, so that faults of the data are found before a run starts.

    Args:
        data: a file, a folder, several of them, or rows.
        tokenizer: of transformers.
        prompt_key: the column of the prompts.
        max_prompt_tokens: longer prompts are left out, and counted.
        limit: use the first rows only.
        template: further arguments of the chat template.

    Raises:
        UsageError: a file cannot be read, row 0 has no prompt (the message shows the row), or no row is left.
    """

    def __init__(
        self,
        data: str | Path | Sequence[str | Path] | Sequence[Row],
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        max_prompt_tokens: int = 1024,
        limit: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        if max_prompt_tokens < 1 or (limit is not None and limit < 1):
            raise UsageError(f"max_prompt_tokens={max_prompt_tokens} and limit={limit} must be ≥ 1")
        rows, self.name = _rows_of(data)
        rows = rows[:limit]
        if not rows:
            raise UsageError(f"{self.name} has no row")
        require_prompt(rows[0], prompt_key, self.name)
        self.prompts: list[Prompt] = []
        too_long = empty = 0
        for index, row in enumerate(rows):
            if not row.get(prompt_key):
                empty += 1
                continue
            try:
                ids = prompt_ids(tokenizer, row[prompt_key], **(template or {}))
            except Exception as error:  # raised by the tokenizer, or by a user's template
                raise UsageError(f"{self.name}, row {index}: {error}") from error
            if not ids:
                empty += 1
            elif len(ids) > max_prompt_tokens:
                too_long += 1
            else:
                self.prompts.append(Prompt(np.asarray(ids, dtype=np.int32), row, index))
        self.counts = Counts(len(rows), too_long, empty, len(self.prompts))
        if not self.prompts:
            raise UsageError(
                f"{self.name} has no usable row: {self.counts}. A prompt may have max_prompt_tokens={max_prompt_tokens}"
            )

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def _rows_of(data: Any) -> tuple[list[Row], str]:
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and data and isinstance(data[0], Mapping):
        return [dict(row) for row in data], "the data"
    files = expand(data)
    return read_rows(files), ", ".join(map(str, files))


def require_prompt(row: Row, key: str, name: str) -> None:
    """Check row 0.

    Raises:
        UsageError: it has no prompt, or one of another type; the message shows the row.
    """
    from difflib import get_close_matches

    value = row.get(key)
    if isinstance(value, str) or (isinstance(value, Sequence) and not isinstance(value, bytes)):
        return
    shown = json.dumps(row, default=str, ensure_ascii=False)
    near = get_close_matches(key, row, 1)
    meant = f"; did you mean prompt_key={near[0]!r}?" if near and near[0] != key else ""
    what = f"has no column {key!r}" if value is None else f"has a {type(value).__name__} as {key!r}"
    raise UsageError(f"{name}: row 0 {what}, where a text or chat messages are expected{meant}. Row 0: {shown[:400]}")
