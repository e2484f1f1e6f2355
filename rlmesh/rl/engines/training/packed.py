"""Packed forward passes of transformers models: from a pack to log-probabilities, entropy and values per target.

A model is prepared once, by :func:`prepare`; then it computes padded batches as before, and packs with the attention of
:mod:`rlmesh.rl.prefix`. Layers get the packed row alone: there is no mask over tokens × tokens.

A pack goes through the model's own ``forward``, so that the wrappers of training engines (DDP, FSDP2, DeepSpeed) notice
the pass and gather parameters::

    terms = model(packed=PackedInputs(pack, device), temperature=1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlmesh.errors import UsageError
from rlmesh.rl.engines.lora import base_model_of
from rlmesh.rl.engines.training.pack_check import Probe, can_probe, probe_fault, rescaled_beyond, static_fault
from rlmesh.rl.head import TokenTerms, chunked_log_probs
from rlmesh.rl.packing import Pack, Segment
from rlmesh.rl.packing import pack as build_packs
from rlmesh.rl.prefix import PrefixLayout, packed_attention

__all__ = ["PackedBatch", "PackedInputs", "PackedPart", "packed_hidden", "packed_log_probs", "packed_values", "prepare"]

NAME = "rlmesh_packed"
CHECKED = "_rlmesh_packs_checked"
"""Name of the attribute that marks a model whose packs were compared with rows alone."""


class PackedInputs:
    """A pack on a device. An empty pack becomes one token without targets: a pass is a collective step, in which a rank
    without tokens takes part.

    Attributes:
        ids, positions: ``[tokens]``.
        sources, targets: ``[targets]``.
        layout: for the attention of every layer.
    """

    def __init__(self, pack: Pack, device: torch.device | str) -> None:
        filler = np.zeros(0 if len(pack) else 1, dtype=np.int64)
        self.ids, self.positions, self.sources, self.targets = (
            torch.from_numpy(column).to(device)
            for column in (
                np.concatenate([pack.ids, filler]),
                np.concatenate([pack.positions, filler]),
                pack.sources,
                pack.targets,
            )
        )
        self.layout = PrefixLayout.of(pack.segments if len(pack) else [Segment(0, 1)], device)


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """The input of one forward and backward pass: a pack, and the columns of its targets for the loss."""

    inputs: PackedInputs
    columns: Any


class PackedBatch:
    """A rank's packs of one optimizer step, one pass for each, for `TrainingEngine.train_step`.

    Args:
        packs: the packs of this rank.
        columns: the columns of each pack, for the loss function.
        empty: the columns of a pack without targets: a rank with fewer packs than others adds empty packs.
        device: device of the model.
    """

    def __init__(
        self, packs: Sequence[Pack], columns: Sequence[Any], empty: Any, device: torch.device | str = "cpu"
    ) -> None:
        if len(packs) != len(columns):
            raise UsageError(f"{len(packs)} packs need as many columns, got {len(columns)}")
        self.packs, self.columns, self.empty, self.device = list(packs), list(columns), empty, device

    @property
    def passes(self) -> int:
        """The number of passes that this rank's packs need."""
        return max(len(self.packs), 1)

    def __len__(self) -> int:
        """The number of targets."""
        return sum(len(pack.targets) for pack in self.packs)

    def split(self, parts: int) -> list[PackedPart]:
        """One part per pack, and empty parts up to ``parts``."""
        if parts < len(self.packs):
            raise UsageError(f"{len(self.packs)} packs cannot go through the model in {parts} passes")
        missing = parts - len(self.packs)
        packs, columns = [*self.packs, *[EMPTY] * missing], [*self.columns, *[self.empty] * missing]
        return [PackedPart(PackedInputs(pack, self.device), own) for pack, own in zip(packs, columns, strict=True)]


EMPTY = build_packs([], token_budget=1).by_rank[0][0]
"""A pack without tokens."""


def prepare(model: nn.Module) -> None:
    """Let a transformers model compute packs. May be called twice.

    The first call compares a small pack with its episodes alone, if the weights are not sharded yet.

    Raises:
        UsageError: the model's attention cannot be replaced, or its packs give other results than rows alone.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    causal = base_model_of(model)
    config: Any = getattr(causal, "config", None)
    change = getattr(causal, "set_attn_implementation", None)
    if config is None or change is None:
        raise UsageError(
            f"{type(model).__name__} cannot compute packs: it is no model of transformers whose attention can be "
            "replaced. Train it with padded batches"
        )
    if fault := static_fault(config):
        raise UsageError(f"{type(causal).__name__} {fault}. Train it with padded batches")
    if config._attn_implementation != NAME:
        _require_equal(causal, change)
    if not hasattr(model, "get_output_embeddings") or getattr(model.forward, "takes_packs", False):
        return
    plain = model.forward

    def forward(
        *args: Any,
        packed: PackedInputs | None = None,
        temperature: float = 1.0,
        chunk_tokens: int | None = None,
        **options: Any,
    ) -> Any:
        if packed is None:
            return plain(*args, **options)
        return packed_log_probs(model, packed, temperature=temperature, chunk_tokens=chunk_tokens)

    forward.takes_packs = True  # type: ignore[attr-defined]
    model.forward = forward


def _require_equal(causal: Any, change: Callable[[str], object]) -> None:
    """Replace the attention of a model, and check that its packs give the results of rows alone.

    Raises:
        UsageError: they do not; the model has its earlier attention again.
    """
    before = causal.config._attn_implementation
    probe = None if getattr(causal, CHECKED, False) or not can_probe(causal) else _rows_alone(causal, change)
    change(NAME)
    if probe is None:
        return
    device = next(causal.parameters()).device
    if fault := probe_fault(causal, probe, lambda layers, whole: packed_hidden(layers, PackedInputs(whole, device))):
        change(before)
        raise UsageError(
            f"{type(causal).__name__} cannot compute packs: {fault}. Train it with padded batches, or another model"
        )
    setattr(causal, CHECKED, True)


def _rows_alone(causal: Any, change: Callable[[str], object]) -> Probe | None:
    """The probe by the model's own attention, which may have more than masks and a softmax."""
    try:
        return Probe.of(causal)
    except torch.OutOfMemoryError:  # says nothing about the attention
        raise
    except RuntimeError:
        # Flash attention does not compute float32, the dtype of weights in training. Every model has eager attention.
        change("eager")
        return Probe.of(causal)


def _require_prepared(model: nn.Module) -> None:
    """Another attention ignores the layout of a pack: each token would see all others."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention != NAME:
        raise UsageError(
            f"{type(model).__name__} cannot compute packs with the attention {attention!r}: call "
            "rlmesh.rl.engines.training.packed.prepare(model) first, and leave the attention as that sets it"
        )


def packed_hidden(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """The last hidden states ``[tokens, width]``, with gradient.

    Args:
        model: the backbone of a prepared model, without its head.

    Raises:
        UsageError: an episode is longer than the model's positions are before they are rescaled.
    """
    limit = rescaled_beyond(getattr(model, "config", None))
    if limit is not None and inputs.layout.longest_keys > limit:
        raise UsageError(
            f"an episode has {inputs.layout.longest_keys} tokens, and beyond {limit} the model rescales the positions "
            "of a whole pass, which packs do not support yet: let prompt and response together have at most as many"
        )
    output: Any = model(
        input_ids=inputs.ids.unsqueeze(0),
        position_ids=inputs.positions.unsqueeze(0),
        # With a mask of four dimensions, transformers makes none from the positions. The attention ignores the mask.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.ids.device),
        use_cache=False,
        packed_layout=inputs.layout,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden[0]


def packed_log_probs(
    model: nn.Module, inputs: PackedInputs, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> TokenTerms:
    """Log-probability of each target and entropy at it, each ``[targets]``, with gradient.

    Args:
        model: a prepared causal language model.
        temperature: the temperature of sampling.
        chunk_tokens: tokens per tile of the head (:func:`rlmesh.rl.head.chunked_log_probs`).

    Raises:
        UsageError: the model is not prepared.
    """
    causal = base_model_of(model)
    _require_prepared(causal)
    head = causal.get_output_embeddings()
    hidden = packed_hidden(causal.base_model, inputs)
    return chunked_log_probs(
        hidden.index_select(0, inputs.sources),
        head.weight,
        inputs.targets,
        bias=head.bias,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )


def packed_values(model: nn.Module, head: nn.Module, inputs: PackedInputs) -> Tensor:
    """The value before each target was sampled, ``[targets]`` in float32 at least, with gradient.

    Args:
        model: the backbone of a prepared model.
        head: a module from ``[…, width]`` to ``[…, 1]``.

    Raises:
        UsageError: the model is not prepared.
    """
    _require_prepared(model)
    values: Tensor = head(packed_hidden(model, inputs).index_select(0, inputs.sources)).squeeze(-1)
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of transformers' layers: for packs, else torch's own.

    Args:
        query: ``[batch, heads, tokens, width]``.
        key, value: ``[batch, key heads, tokens, width]``.

    Returns:
        ``[batch, tokens, heads, width]``, and no attention weights.
    """
    layout: PrefixLayout | None = options.pop("packed_layout", None)
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return result
    if options.get("dropout"):
        raise UsageError("packs are computed without dropout in the attention: set attention_dropout to 0")
    window = options.get("sliding_window")
    if window is not None and layout.longest_keys > window:
        raise UsageError(
            f"an episode has {layout.longest_keys} tokens, and the model's layers attend to a sliding window of "
            f"{window}, which packs do not support yet: let prompt and response together have at most as many tokens"
        )
    return packed_attention(query[0], key[0], value[0], layout, scale=options.get("scaling")).unsqueeze(0), None
