from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The first torch call of a process takes long, whatever is tested: no deadline per example.
settings.register_profile("rl", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("rl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and its tokenizer of letters."""
    pytest.importorskip("transformers")
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def make_tiny(folder: Path, **sizes: Any) -> Path:
    """Save a model and its tokenizer of letters; ``sizes`` are those of the model's configuration."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<end>", *"abcdefgh", ">"]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    usual: dict[str, Any] = {
        "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen2Config(**(usual | sizes), pad_token_id=0, eos_token_id=1, bos_token_id=None)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
