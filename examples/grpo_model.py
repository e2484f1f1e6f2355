"""Make the model, tokenizer and data of grpo.py and ppo in a folder: python examples/grpo_model.py tiny

The task is to spell five letters backwards: ``bdaeh>`` → ``headb``. The model has 0.34 million parameters. Supervised
learning warms it up until about a fifth of its sampled answers are right, as a pretrained model would be.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import string
import sys
from pathlib import Path
from typing import Any

LETTERS, LENGTH = "abcdefgh", 5
VALIDATION = 256
"""Strings for validation. All others, 32,512 of them, are for training."""
PAD, END = "<pad>", "<end>"
VOCABULARY = [PAD, END, *string.ascii_lowercase, *string.digits, *"> +-*=?."]
ACCURACY = 0.2


def words(seed: int) -> dict[str, list[str]]:
    """The strings of each set, in an order that the seed determines."""
    found = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(seed).shuffle(found)
    return {"train": found[VALIDATION:], "validation": found[:VALIDATION]}


def build_tokenizer() -> Any:
    """One token per character of a vocabulary of 46; any other character is an error."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def build_model(seed: int) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
            pad_token_id=VOCABULARY.index(PAD), eos_token_id=VOCABULARY.index(END), bos_token_id=None,
        )
    )  # fmt: skip


def warm_up(
    model: Any, tokenizer: Any, train: list[str], *, seed: int, accuracy: float, most_steps: int = 400
) -> float:
    """Supervised learning until sampled answers are right with the given frequency; gives the reached one.

    Raises:
        RuntimeError: the accuracy was not reached.
    """
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    reached = 0.0
    for step in range(1, most_steps + 1):
        rows = [f"{word}>{word[::-1]}" for word in rng.sample(train, 128)]  # All rows are of the same length.
        ids = torch.tensor([[*row, tokenizer.eos_token_id] for row in tokenizer(rows)["input_ids"]])
        labels = ids.clone()
        labels[:, : LENGTH + 1] = -100  # The prompt is not learnt.
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        if step % 5 == 0:
            drawn = rng.sample(train, 256)
            asked = torch.tensor(tokenizer([f"{word}>" for word in drawn])["input_ids"])
            torch.manual_seed(seed + step)
            made = model.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=LENGTH + 1, do_sample=True, top_k=0
            )
            said = [tokenizer.convert_ids_to_tokens(row) for row in made[:, LENGTH + 1 :].tolist()]
            reached = sum(a == [*word[::-1], END] for a, word in zip(said, drawn, strict=True)) / len(drawn)
            if reached >= accuracy:
                return reached
    raise RuntimeError(f"the warm-up reached an accuracy of {reached:.2f} in {most_steps} steps, not {accuracy:.2f}")


def make(folder: Path, *, seed: int = 0, accuracy: float = ACCURACY) -> float:
    """Make everything in a new folder, which is there as a whole or not at all; gives the reached accuracy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The model is too small for more.
    sets, tokenizer, model = words(seed), build_tokenizer(), build_model(seed)
    reached = warm_up(model, tokenizer, sets["train"], seed=seed, accuracy=accuracy)
    torch.set_num_threads(threads)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    for name, some in sets.items():
        lines = [json.dumps({"prompt": f"{word}>", "ground_truth": word[::-1]}) + "\n" for word in some]
        (aside / f"{name}.jsonl").write_text("".join(lines))
    try:
        aside.rename(folder)
    except OSError:  # Another process has made it meanwhile, or there is another folder.
        shutil.rmtree(aside)
        if not (folder / "train.jsonl").exists():
            raise
    return reached


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{target}: {make(target):.0%} of the sampled answers are right")
