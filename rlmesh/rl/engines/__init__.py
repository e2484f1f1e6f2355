"""Engines: what trains and what samples, each behind a small protocol.

``training``
    `TrainingEngine`: a model, its optimizer and how both are spread over ranks.
``rollout``
    `RolloutEngine`, what every engine that samples offers, and the values that go in and out. No torch.
``sampling``
    Tokens from logits, as pure functions.
``transformers``
    A rollout engine that needs nothing but torch and transformers.

Import from the modules themselves: each needs the library that it is for.
"""

from __future__ import annotations
