"""vLLM as a rollout engine: in this process (`VllmEngine`) or beside it (`AsyncVllmEngine`), on CPU and CUDA.

``sync_engine``, ``async_engine``
    The two engines. Import them from there.
``base``
    What they share: admission, the sink of a weight sync, sleep.
``worker``
    What runs in vLLM's own workers: weights into its layers, and a check of the copies that it packs.
``buckets``
    Weights to workers in other processes, through memory without a name.

Written for vLLM 0.32; docs/writing-an-engine.md says what of it was run where.
"""

from __future__ import annotations
