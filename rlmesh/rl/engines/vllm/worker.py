"""`WorkerExtension`: methods that `VllmEngine` adds to vLLM's workers, which run them by name.

Weights are loaded by vLLM's own code, layer by layer: fused, sharded and packed as when the model is read from disk.
One thing is missing there: if embedding and head are tied, the head has a separate packed copy on a CPU, which loading
does not renew. No error would be raised; the engine would use the old head with new layers. So copies are packed again
here, and compared with their weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlmesh.rl.engines.vllm.buckets import BucketReader
from rlmesh.rl.engines.vllm.carried_mass import carry_mass

__all__ = ["WorkerExtension"]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed difference between products with a packed copy and plain products, as a share of the largest."""


class WorkerExtension:
    """Methods for vLLM's worker. Their names have a prefix, since they share the worker's namespace."""

    def rlmesh_carry_mass(self) -> bool:
        """Let log-probs carry the mass that truncation keeps; False if the sampler of this vLLM is not known here."""
        worker: Any = self
        return carry_mass(getattr(worker.model_runner, "sampler", None))

    def rlmesh_begin(self) -> None:
        """Prepare to load all weights; an unfinished earlier load is completed first."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if getattr(self, "_rlmesh_missing", None) is not None:
            self.rlmesh_abandon()
        worker: Any = self
        model = worker.get_model()
        # Names of parameters with memory: packed layers free theirs, and show an empty tensor.
        self._rlmesh_missing: set[str] | None = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(model)

    def rlmesh_load(self, tensors: Iterable[tuple[str, Tensor]], keep: bool) -> None:
        """Load some weights, by checkpoint names. Unless ``keep``, their memory is reused afterwards."""
        self._rlmesh_load(tensors if keep else _copies(tensors))

    def rlmesh_load_bucket(self, written: Mapping[str, Any]) -> None:
        """Load some weights from another process."""
        reader = getattr(self, "_rlmesh_reader", None)
        if reader is None:
            reader = self._rlmesh_reader = BucketReader()
        self._rlmesh_load(reader.read(written))

    @torch.no_grad()
    def _rlmesh_load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        worker: Any = self
        missing = self._rlmesh_missing
        if missing is None:
            raise RuntimeError("weights came before rlmesh_begin")
        with set_current_vllm_config(worker.vllm_config):
            loaded = worker.get_model().load_weights(iter(list(tensors)))
        if loaded is not None:
            missing -= loaded

    @torch.no_grad()
    def rlmesh_finish(self) -> dict[str, Any]:
        """Complete the load: process remaining layers, renew packed copies, and check them.

        Returns:
            ``missing``: parameters without a weight; ``gap``: largest relative difference of a packed copy.
        """
        worker: Any = self
        missing = sorted(self._rlmesh_missing or ())
        self._rlmesh_settle()
        gap = 0.0
        for layer in _packed_embeddings(worker.get_model()):
            layer.quant_method.process_weights_after_loading(layer)
            gap = max(gap, _packing_gap(layer))
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(worker.model_runner, reset, lambda: None)()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {"missing": missing, "gap": gap}

    def rlmesh_abandon(self) -> None:
        """Give up the load: make the model usable again, whatever weights it has."""
        if getattr(self, "_rlmesh_missing", None) is not None:
            self._rlmesh_settle()

    @torch.no_grad()
    def _rlmesh_settle(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        worker: Any = self
        # vLLM warns of each layer without weights in a checkpoint, such as rotary embeddings; missing weights are
        # reported by the engine.
        with set_current_vllm_config(worker.vllm_config), _silent("vllm.model_executor.model_loader.reload.layerwise"):
            finalize_layerwise_reload(worker.get_model(), worker.vllm_config.model_config)
        self._rlmesh_missing = None


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Silence a logger by a filter, since a change of its level takes milliseconds to reach all loggers."""
    logger = logging.getLogger(name)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    made: dict[int, Tensor] = {}
    for name, tensor in tensors:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone()
        yield name, made[id(tensor)]


def _packed_embeddings(model: torch.nn.Module) -> list[Any]:
    """Embeddings and heads that compute with a packed copy of their weight."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return [
        layer
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear") and layer.weight.numel()
    ]


def _packing_gap(layer: Any) -> float:
    """The difference between products with the packed copy and plain ones, as a share of the largest.

    Raises:
        RuntimeError: the difference is larger than rounding explains: the copy is of other weights.
    """
    weight = layer.weight
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(2, weight.shape[1], generator=generator).to(weight.dtype)
    packed = layer.quant_method.apply(layer, probe)
    plain = torch.nn.functional.linear(probe, weight)
    gap = float((packed - plain).abs().max() / plain.abs().max().clamp(min=1e-6))
    if not gap <= TOLERANCE.get(weight.dtype, 5e-2):
        raise RuntimeError(
            f"{type(layer).__name__} multiplies by a packed copy that is not of its weights (relative gap {gap:.3g}): "
            "this version of vLLM packs in a way that is not known here"
        )
    return gap
