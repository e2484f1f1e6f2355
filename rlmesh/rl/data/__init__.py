"""Prompts: data sets, chat templates, a resumable order, and the preparation of well-known data sets.

::

    data = RLHFDataset("data/train.parquet", tokenizer, max_prompt_tokens=512)
    loader = PromptLoader(data, batch_size=128, seed=1)
    rows = loader.batch(step)        # depends on step, seed and the data alone
"""

from __future__ import annotations

from rlmesh.rl.data.dataset import Prompt, RLHFDataset
from rlmesh.rl.data.loader import Mixture, PromptLoader, load_prompts

__all__ = ["Mixture", "Prompt", "PromptLoader", "RLHFDataset", "load_prompts"]
