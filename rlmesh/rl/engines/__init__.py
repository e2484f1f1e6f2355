"""Training and rollout engines, each behind a small protocol.

``training``
    `TrainingEngine`: a model and its optimizer, distributed over ranks.
``rollout``
    `RolloutEngine`, the interface of engines that sample, with its input and output types. No torch.
``sampling``
    Tokens from logits.
``transformers``
    A rollout engine that needs only torch and transformers.
``continuous``, ``slots``
    Its batch, whose rows come and go, and the key-value cache below.
``lora``
    `LoraOptions`: adapters that are trained, and served, in place of the weights.

Import from the modules themselves: each needs the library that it is for.
"""

from __future__ import annotations
