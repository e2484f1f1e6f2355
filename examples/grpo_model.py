"""Make the model, tokenizer and data of grpo.py in a folder: python examples/grpo_model.py tiny

The model has 0.34 million parameters. Supervised learning warms it up until about a fifth of its sampled answers
are right, as a pretrained model would be.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ppo.data import read, write
from ppo.model import make_pretrained

ACCURACY = 0.2


def main(folder: Path) -> None:
    write(folder / "parquet", seed=0)
    rows = {name: read(folder / "parquet" / f"{name}.parquet") for name in ("train", "validation")}
    for name, some in rows.items():
        lines = [json.dumps({"prompt": row.prompt, "ground_truth": row.answer}) + "\n" for row in some]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    reached = make_pretrained(folder / "model", rows["train"], seed=0, accuracy=ACCURACY)
    for file in (folder / "model").iterdir():
        file.replace(folder / file.name)
    (folder / "model").rmdir()
    print(f"{folder}: {reached:.0%} of the sampled answers are right")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
