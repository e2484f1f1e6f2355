"""Data sets that can be prepared, each as a function from a row of its files to a row of `RLHFDataset`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.data.files import SUFFIXES, Row, read_rows, write_parquet

__all__ = ["SETS", "Set", "prepare"]

STEP_BY_STEP = "Let's think step by step"


@dataclass(frozen=True)
class Set:
    """A data set that can be prepared.

    Attributes:
        source: its usual name, which becomes ``data_source``.
        columns: the columns of its files.
        row: one row of its files → prompt, ground truth (``None``: a reward model scores), and further data to keep.
    """

    source: str
    columns: tuple[str, ...]
    row: Callable[[Row], tuple[str, Any, Mapping[str, Any]]]


def _gsm8k(row: Row) -> tuple[str, Any, Mapping[str, Any]]:
    _, marker, truth = str(row["answer"]).rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    question = f'{row["question"]} {STEP_BY_STEP} and output the final answer after "####".'
    return question, truth.strip().replace(",", ""), {"question": row["question"], "answer": row["answer"]}


def _math(row: Row) -> tuple[str, Any, Mapping[str, Any]]:
    truth = last_boxed(str(row["solution"]))
    if truth is None:
        raise ValueError(r"the solution has no \boxed{…}")
    question = f"{row['problem']} {STEP_BY_STEP} and output the final answer within \\boxed{{}}."
    return question, truth, {"level": row.get("level"), "type": row.get("type")}


def _hellaswag(row: Row) -> tuple[str, Any, Mapping[str, Any]]:
    choices = row["endings"]
    letters = "ABCDEFGH"[: len(choices)]
    listed = "\n".join(f"{letter}. {_plain(choice)}" for letter, choice in zip(letters, choices, strict=True))
    label = str(row["label"])
    if not label.isdigit() or int(label) >= len(letters):
        raise ValueError(f"the label {label!r} is none of the {len(letters)} endings")
    question = (
        f"{_plain(str(row['ctx']))}\n\nWhich ending fits best?\n{listed}\n\n"
        f"Answer with one letter of {', '.join(letters)}."
    )
    return question, letters[int(label)], {"endings": choices}


def _hh_rlhf(row: Row) -> tuple[str, Any, Mapping[str, Any]]:
    chosen, rejected = str(row["chosen"]), str(row["rejected"])
    mark = "\n\nAssistant:"
    end = chosen.rfind(mark)
    if end < 0:
        raise ValueError("the dialogue has no turn of the assistant")
    end += len(mark)
    worse = rejected[rejected.rfind(mark) + len(mark) :].strip()
    return chosen[:end], None, {"chosen": chosen[end:].strip(), "rejected": worse}


SETS: Mapping[str, Set] = {
    "gsm8k": Set("openai/gsm8k", ("question", "answer"), _gsm8k),
    "math": Set("lighteval/MATH", ("problem", "solution"), _math),
    "hellaswag": Set("Rowan/hellaswag", ("ctx", "endings", "label"), _hellaswag),
    "hh_rlhf": Set("Anthropic/hh-rlhf", ("chosen", "rejected"), _hh_rlhf),
}


def prepare(name: str, source: Path, target: Path) -> dict[str, int]:
    """Write one parquet file per split.

    Args:
        name: of `SETS`.
        source: a file, or a folder with one file or folder per split (``train.jsonl``, ``test.parquet``,
            ``train-00000-of-00001.parquet``, …).
        target: the folder to write to.

    Returns:
        rows by the name of the split.

    Raises:
        UsageError: the set is unknown, there are no files, or a row is not of the set's form (the message names it).
    """
    if name not in SETS:
        raise UsageError(f"no data set is named {name!r}: use one of {', '.join(SETS)}")
    return {
        split: write_parquet(_rows(SETS[name], read_rows(list(files)), split, files[0]), target / f"{split}.parquet")
        for split, files in _splits(source).items()
    }


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}``, with balanced braces; ``None`` if there is none."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place].strip()
    return None


def _rows(of: Set, rows: list[Row], split: str, where: Path) -> list[Row]:
    found = []
    for index, row in enumerate(rows):
        missing = [column for column in of.columns if row.get(column) is None]
        if missing:
            raise UsageError(
                f"{where}, row {index} of {of.source} has no {', '.join(missing)}: it has {', '.join(row)}"
            )
        try:
            prompt, truth, extra = of.row(row)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{where}, row {index} of {of.source}: {error}") from error
        found.append(
            {
                "data_source": of.source,
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "model" if truth is None else "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index} | dict(extra),
            }
        )
    return found


def _splits(source: Path) -> dict[str, list[Path]]:
    if not source.exists():
        raise UsageError(f"there is no file or folder {source}")
    if source.is_file():
        return {_split_of(source): [source]}
    found: dict[str, list[Path]] = {}
    for child in sorted(source.iterdir()):
        if child.is_dir() or child.suffix in SUFFIXES:
            found.setdefault(_split_of(child), []).append(child)
    if not found:
        raise UsageError(f"the folder {source} has no {', '.join(SUFFIXES)} file")
    return found


def _split_of(path: Path) -> str:
    """``train`` of ``train-00000-of-00001.parquet``."""
    return re.split(r"[-.]", path.name)[0]


def _plain(text: str) -> str:
    """Remove the marks in brackets of HellaSwag's texts."""
    return " ".join(re.sub(r"\[[^\]]*\]", "", text).split())
