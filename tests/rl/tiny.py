"""Tiny models and tokenizers, made by tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ["<pad>", "<end>", *"abcdefgh", ">"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}>{% endfor %}"


def make_tokenizer(folder: Path, *, template: str | None = None, words: list[str] | None = None) -> Any:
    """Save a tokenizer of letters, and give it."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    known = {word: place for place, word in enumerate(words or WORDS)}
    tokenizer = Tokenizer(WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def make_config(**changes: Any) -> Any:
    """A Qwen2 of two layers."""
    from transformers import Qwen2Config

    sizes: dict[str, Any] = {
        "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    return Qwen2Config(**(sizes | changes))


def make_reward_model(folder: Path, *, labels: int = 1, seed: int = 0, template: str | None = None) -> Path:
    """Save a reward model with its tokenizer; gives the folder."""
    import torch
    from transformers import Qwen2ForSequenceClassification

    make_tokenizer(folder, template=template)
    torch.manual_seed(seed)
    Qwen2ForSequenceClassification(make_config(num_labels=labels)).save_pretrained(folder)
    return folder
