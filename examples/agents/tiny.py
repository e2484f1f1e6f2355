"""Make the model of these examples in a folder, without downloads: python tiny.py calculator|sticks FOLDER

The model has 0.2 million parameters, one token per character and a chat template. Supervised learning teaches it the
form of its answers, and rarely the right ones, as a pretrained model knows them.
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END = "<pad>", "<end>"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '<end>' if message['role'] == 'assistant' else '>' }}{% endfor %}"
)
Dialogue = list[tuple[str, bool]]
"""Texts, and whether they are the assistant's."""


def calculator(rng: random.Random) -> Dialogue:
    """One in five dialogues uses the calculator; the other answers are guessed."""
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    if rng.random() < 0.2:
        return [(f"{a}*{b}>", False), (f"={a}*{b}", True), (f"{a * b}>", False), (str(a * b), True)]
    return [(f"{a}*{b}>", False), (str(rng.randrange(100, 10_000)), True)]


def sticks(rng: random.Random) -> Dialogue:
    """One move in three is right: it leaves a multiple of four. The others are random."""
    left, turns = rng.randint(5, 9), list[tuple[str, bool]]()
    while left > 0:
        move = left % 4 if left % 4 and rng.random() < 1 / 3 else rng.randint(1, 3)
        turns += [(f"{left}>", False), (str(move), True)]
        left -= move + rng.randint(1, 3)
    return turns


def rows(name: str) -> list[dict[str, object]]:
    if name == "sticks":
        return [
            {"prompt": [{"role": "user", "content": str(5 + seed % 5)}], "sticks": 5 + seed % 5, "seed": seed}
            for seed in range(1000)
        ]
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "ground_truth": str(a * b)} for a, b in pairs[:2000]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = [PAD, END, *string.digits, *string.ascii_lowercase, *">=+-*? "]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    made.chat_template = TEMPLATE
    return made


def make_model(vocabulary: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def teach(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, draw: Callable[[random.Random], Dialogue], steps: int
) -> None:
    """Supervised learning on the assistant's texts."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for _ in range(steps):
        batch = []
        for _ in range(64):
            ids, own = [], []
            for text, mine in draw(rng):
                part = tokenizer(text + (END if mine else ""), add_special_tokens=False)["input_ids"]
                ids, own = ids + part, own + [mine] * len(part)
            batch.append((ids, own))
        width = max(len(ids) for ids, _ in batch)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor(
            [
                [one if mine else -100 for one, mine in zip(*pair, strict=True)] + [-100] * (width - len(pair[0]))
                for pair in batch
            ]
        )
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main(name: str, folder: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    draw, steps = {"calculator": (calculator, 400), "sticks": (sticks, 120)}[name]
    teach(model, tokenizer, draw, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(name)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
