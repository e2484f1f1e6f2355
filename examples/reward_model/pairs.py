"""Make a model, its tokenizer and pairs of responses in a folder: python examples/reward_model/pairs.py tiny

The responses are words of the letters a to h; the chosen one has more vowels.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

VOCABULARY = ["<pad>", "<end>", *"abcdefgh", ">"]


def make_model(folder: Path) -> None:
    """Save a language model of 0.2 million parameters with random weights, and a tokenizer of letters."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(WordLevel({token: place for place, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def vowels(word: str) -> int:
    return word.count("a") + word.count("e")


def make_pairs(path: Path, count: int, rng: random.Random) -> None:
    """Write pairs that differ in their number of vowels, the better one as ``chosen``."""
    lines = []
    while len(lines) < count:
        prompt, one, other = ("".join(rng.choices("abcdefgh", k=rng.randint(3, 8))) for _ in range(3))
        if vowels(one) != vowels(other):
            rejected, chosen = sorted((one, other), key=vowels)
            lines.append(json.dumps({"prompt": f"{prompt}>", "chosen": chosen, "rejected": rejected}) + "\n")
    path.write_text("".join(lines))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, count in (("train", 4096), ("validation", 256)):
        make_pairs(folder / f"{name}.jsonl", count, rng)
    make_model(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
