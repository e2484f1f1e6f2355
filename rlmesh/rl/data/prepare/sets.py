"""Data sets that can be prepared, each as a function from a row of its files to a row of `RLHFDataset`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.data.files import SUFFIXES, Row, is_data, read_rows, write_parquet

__all__ = ["SETS", "Set", "prepare"]

STEP_BY_STEP = "Let's think step by step"

Prepared = tuple[str | list[dict[str, str]], Any, Mapping[str, Any]]

_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation",
           "dev": "validation"}  # fmt: skip
_SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(_SPLITS)})(?=[-.]|$)")


@dataclass(frozen=True)
class Set:
    """A data set that can be prepared.

    Attributes:
        source: its usual name, which becomes ``data_source``.
        columns: the columns of its files.
        row: function from one row of its files to the prompt, the ground truth (``None``: a reward model scores the
            responses), and further data to keep.
        truth: the column with the right answers, for sets that lack them in some split (such as the test split of a
            competition); such a split is left out. ``""``: every split has answers.
        subsets: True: folders are parts of the set, and are read together. False: they are versions of the set, of
            which one must be chosen.
    """

    source: str
    columns: tuple[str, ...]
    row: Callable[[Row], Prepared]
    truth: str = ""
    subsets: bool = False


def _gsm8k(row: Row) -> Prepared:
    _, marker, truth = str(row["answer"]).rpartition("####")
    if not marker:
        raise ValueError("the answer has no ####")
    question = f'{row["question"]} {STEP_BY_STEP} and output the final answer after "####".'
    return question, truth.strip().replace(",", ""), {"question": row["question"], "answer": row["answer"]}


def _math(row: Row) -> Prepared:
    truth = last_boxed(str(row["solution"]))
    if truth is None:
        raise ValueError(r"the solution has no \boxed{…}")
    question = f"{row['problem']} {STEP_BY_STEP} and output the final answer within \\boxed{{}}."
    return question, truth, {"level": row.get("level"), "type": row.get("type")}


def _hellaswag(row: Row) -> Prepared:
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


def _hh_rlhf(row: Row) -> Prepared:
    chosen, rejected = _messages(str(row["chosen"])), _messages(str(row["rejected"]))
    for dialogue in (chosen, rejected):
        if len(dialogue) < 2 or dialogue[-1]["role"] != "assistant":
            raise ValueError("the dialogue has no question, or does not end with a turn of the assistant")
    return chosen[:-1], None, {"chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}


def _messages(dialogue: str) -> list[dict[str, str]]:
    """The turns of ``"\\n\\nHuman: …\\n\\nAssistant: …"``. Turns of one side that follow each other are joined."""
    _, *parts = re.split(r"\n\n(Human|Assistant):", dialogue)
    found: list[dict[str, str]] = []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        if found and found[-1]["role"] == role:
            found[-1]["content"] += f"\n\n{text.strip()}"
        else:
            found.append({"role": role, "content": text.strip()})
    return found


SETS: Mapping[str, Set] = {
    "gsm8k": Set("openai/gsm8k", ("question", "answer"), _gsm8k),
    "math": Set("lighteval/MATH", ("problem", "solution"), _math, subsets=True),
    "hellaswag": Set("Rowan/hellaswag", ("ctx", "endings", "label"), _hellaswag, truth="label"),
    "hh_rlhf": Set("Anthropic/hh-rlhf", ("chosen", "rejected"), _hh_rlhf, subsets=True),
}


def prepare(name: str, source: Path, target: Path) -> dict[str, int]:
    """Write one parquet file per split.

    Args:
        name: a key of `SETS`.
        source: a file, or a folder. The split of a file follows from a folder or file name with the word ``train``,
            ``test``, ``validation``, ``val`` or ``dev``: ``train.jsonl``, ``hellaswag_val.jsonl``,
            ``test-00000-of-00001.parquet``, ``train/algebra/1.json``, ``helpful-base/train.jsonl.gz``.
        target: the folder to write to.

    Returns:
        rows by the name of the split; 0 for a split without right answers, which is not written.

    Raises:
        UsageError: the set is unknown, there are no files, folders are versions of the set of which one must be chosen,
            or a row is not of the set's form (the message names it). No file was written.
    """
    if name not in SETS:
        raise UsageError(f"no data set is named {name!r}: use one of {', '.join(SETS)}")
    of = SETS[name]
    splits = {split: _rows(of, files, split) for split, files in _splits(of, source, target.resolve()).items()}
    if not any(splits.values()):
        raise UsageError(f"no split of {source} has right answers")
    for split, rows in splits.items():
        if rows:
            write_parquet(rows, target / f"{split}.parquet")
    return {split: len(rows) for split, rows in splits.items()}


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


def _rows(of: Set, files: list[Path], split: str) -> list[Row]:
    read = [(path, row) for path in files for row in _read(path)]
    if of.truth and all(row.get(of.truth) in (None, "") for _, row in read):
        return []
    found = []
    for index, (path, row) in enumerate(read):
        missing = [column for column in of.columns if row.get(column) is None]
        if missing:
            raise UsageError(f"{path}, row {index} of {of.source} has no {', '.join(missing)}: it has {', '.join(row)}")
        try:
            prompt, truth, extra = of.row(row)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}, row {index} of {of.source}: {error}") from error
        found.append(
            {
                "data_source": of.source,
                "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                "reward_model": {"style": "model" if truth is None else "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index} | dict(extra),
            }
        )
    return found


def _read(path: Path) -> list[Row]:
    """The rows of a file; a JSON file may be one row, as in MATH's folders."""
    if path.suffix == ".json":
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is no JSON: {error}") from error
        if isinstance(whole, dict):
            return [whole]
    return read_rows(path)


def _splits(of: Set, source: Path, target: Path) -> dict[str, list[Path]]:
    """The files of each split; those in the target folder are left out."""
    if not source.exists():
        raise UsageError(f"there is no file or folder {source}")
    if source.resolve() == target:
        raise UsageError(f"--from and --to are both {source}: write to another folder")
    if source.is_file():
        return {_split_of(source.name) or "train": [source]}
    found: dict[str, list[Path]] = {}
    versions: dict[str, set[Path]] = {}
    ignored = []
    for path in sorted(filter(is_data, source.rglob("*"))):
        if path.resolve().is_relative_to(target):
            continue
        parts = path.relative_to(source).parts
        named = [(place, split) for place, part in enumerate(parts) if (split := _split_of(part))]
        if not named:
            ignored.append(str(path.relative_to(source)))
            continue
        place, split = named[0]
        found.setdefault(split, []).append(path)
        versions.setdefault(split, set()).add(Path(*parts[:place]))
    if not found:
        names = ", ".join(dict.fromkeys(_SPLITS))
        listed = f"; it has {', '.join(ignored[:5])}" if ignored else ""
        raise UsageError(f"the folder {source} has no {', '.join(SUFFIXES)} file of a split ({names}){listed}")
    for split, folders in versions.items():
        if len(folders) > 1 and not of.subsets:
            raise UsageError(
                f"{source} has several folders with a split {split!r}: give one of them by --from, "
                f"{' or '.join(sorted(str(source / folder) for folder in folders))}"
            )
    return found


def _split_of(name: str) -> str | None:
    """``train`` of ``train-00000-of-00001.parquet``; ``None`` if the name has no split."""
    found = _SPLIT.search(name)
    return _SPLITS[found[1]] if found else None


def _plain(text: str) -> str:
    """Remove the marks in brackets of HellaSwag's texts."""
    return " ".join(re.sub(r"\[[^\]]*\]", "", text).split())
