"""Prompts as parquet files: spell five letters backwards, ``bdaeh>`` → ``headb``.

    python data.py --out DIR --seed 0

writes ``train.parquet`` (32,512 prompts) and ``validation.parquet`` (256): together all strings of five letters from a
to h, so no validation prompt is used for training. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

LETTERS = "abcdefgh"
LENGTH = 5
VALIDATION_SIZE = 256
SOURCE = "reverse-5"


@dataclass(frozen=True)
class Row:
    """One line of a file: the text of the prompt, and the right answer."""

    prompt: str
    answer: str


def write(directory: Path, seed: int) -> None:
    """Write both files; existing ones are replaced atomically."""
    # Imported here, since importing pyarrow starts a thread, and a process with threads must not be forked.
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(seed).shuffle(words)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("validation", words[:VALIDATION_SIZE]), ("train", words[VALIDATION_SIZE:])):
        table = pa.table(
            {
                "data_source": [SOURCE] * len(part),
                "prompt": [f"{word}>" for word in part],
                "answer": [word[::-1] for word in part],
            }
        )
        aside = directory / f".{name}.{os.getpid()}.tmp"
        pq.write_table(table, aside)
        aside.replace(directory / f"{name}.parquet")


def read(path: Path) -> list[Row]:
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["prompt", "answer"])
    return [Row(line["prompt"], line["answer"]) for line in table.to_pylist()]


def batches(rows: list[Row], size: int, seed: int) -> Iterator[list[Row]]:
    """An endless sequence of batches: :func:`batch` 0, 1, 2, …"""
    return (batch(rows, size, seed, number) for number in itertools.count())


def batch(rows: list[Row], size: int, seed: int, number: int) -> list[Row]:
    """One batch, by its number. Each epoch has every row at most once, in a different order; the rest of an epoch that
    fills no batch is dropped."""
    if size > len(rows):
        raise ValueError(f"a batch of {size} rows cannot be drawn from {len(rows)} rows")
    epoch, place = divmod(number, len(rows) // size)
    order = _order(seed, epoch, len(rows))
    return [rows[i] for i in order[place * size : (place + 1) * size]]


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    return random.Random(f"{seed}/{epoch}").sample(range(count), count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the prompts of the PPO example as parquet files.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, args.seed)


if __name__ == "__main__":
    main()
