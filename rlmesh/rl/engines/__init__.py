"""Training and rollout engines, each behind a small protocol.

``training``
    `TrainingEngine`: a model and its optimizer, distributed over ranks.
``rollout``
    `RolloutEngine`, the interface of engines that sample, with its input and output types. No torch.
``sampling``
    Tokens from logits.
``transformers``
    A rollout engine that needs only torch and transformers.

Import from the modules themselves: each needs the library that it is for.
"""

from __future__ import annotations
