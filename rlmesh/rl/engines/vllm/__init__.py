"""vLLM as a rollout engine: in this process (`VllmEngine`) or beside it (`AsyncVllmEngine`), on CPU and CUDA.

``sync_engine``, ``async_engine``
    The two engines. Import them from there.
``base``
    Their common part: admission, the sink of a weight sync, sleep.
``worker``
    The code in vLLM's workers: loading weights into layers, and a check of vLLM's packed copies.
``buckets``
    Weights to workers in other processes, through anonymous memory.

Written for vLLM 0.32; docs/writing-an-engine.md lists what was tested on which version.
"""

from __future__ import annotations
