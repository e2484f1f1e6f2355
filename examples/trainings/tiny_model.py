"""Make a model without training, and its tokenizer of letters: python examples/trainings/tiny_model.py tiny [WIDTH]"""

import sys
from pathlib import Path

WORDS = ["<pad>", "<end>", *"abcdefgh", ">"]


def make(folder: Path, width: int = 32, layers: int = 2, seed: int = 0) -> Path:
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:]))
