"""Key-value caches for a batch whose rows come and go: `SlotCache`, and `WholeCache` for models with other caches.

A slot holds the keys and values of one row at ``[start, end)`` of its memory. So rows of any length are side by side,
and a new row takes a free slot without a copy of the other rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rlmesh.rl.engines.decode_graphs import DecodeGraphs, padded_rows, padded_width
from rlmesh.rl.engines.lora import base_model_of

__all__ = ["BatchCache", "SlotCache", "WholeCache", "cache_for", "prefill"]

ATTENTIONS = ("sdpa", "rlmesh_packed", "rlmesh_grouped")
ROUND = 128
"""Slots grow by multiples of this many tokens."""


class BatchCache(Protocol):
    """Keys and values of the rows of a batch, one slot for each.

    Attributes:
        can_join: True if rows may join while others are being sampled.
    """

    can_join: bool

    def put(self, slots: Sequence[int], cache: Any, rows: Sequence[int], pads: Sequence[int]) -> None:
        """Copy rows of a prefilled cache (padded on the left by ``pads`` tokens) into slots."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copy a slot over another."""
        ...

    def decode(self, model: Any, tokens: Sequence[int], name: str) -> Tensor:
        """Process a token for each of the first slots; returns logits ``[slots, vocabulary]`` of the next tokens."""
        ...


def prefill(
    model: Any, contexts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Any, list[int], str]:
    """Process whole contexts, padded on the left.

    Returns:
        logits ``[rows, vocabulary]`` of the next tokens, the model's cache, the padding of each row, and the name of
        the model's argument for a cache.
    """
    width = max(map(len, contexts))
    pads = [width - len(tokens) for tokens in contexts]
    ids = torch.tensor([[pad] * lead + list(row) for lead, row in zip(pads, contexts, strict=True)], device=device)
    attend = (torch.arange(width, device=device) >= torch.tensor(pads, device=device).unsqueeze(1)).long()
    positions = (attend.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=attend, position_ids=positions, use_cache=True, logits_to_keep=1)
    # Newer versions of transformers call it cache.
    name = "cache" if "cache" in out else "past_key_values"
    return out.logits[:, -1], out[name], pads, name


def cache_for(model: Any, cache: Any, graphs: DecodeGraphs | None = None) -> BatchCache:
    """The cache of a batch, depending on the model's own cache: rows can join if all layers keep all keys."""
    plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
    config = getattr(base_model_of(model), "config", None)
    # The mask of four dimensions that slots need is one of torch's attention.
    attention = getattr(config, "_attn_implementation", "")
    return SlotCache(len(cache.layers), graphs) if plain and attention in ATTENTIONS else WholeCache()


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's memory, ``[slots, heads, width, head]``; ``update`` writes one token per row at the row's end."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        # A weak reference to the owner avoids a cycle, so the memory is freed together with the owner.
        self.owner: SlotCache = weakref.proxy(owner)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        count, width = len(key_states), self.owner.reach
        at, ends = self.owner.rows, self.owner.ends
        assert self.keys is not None and self.values is not None
        self.keys[at, :, ends] = key_states[:, :, 0]
        self.values[at, :, ends] = value_states[:, :, 0]
        return self.keys[:count, :, :width], self.values[:count, :, :width]

    def get_seq_length(self) -> int:
        return self.owner.reach - 1


class SlotCache:
    """Slots for a model whose layers keep the keys and values of all tokens.

    Args:
        layers: number of layers.
        graphs: replays passes as CUDA graphs; None: passes run without graphs.
    """

    can_join = True

    def __init__(self, layers: int, graphs: DecodeGraphs | None = None) -> None:
        self._graphs = graphs
        self._layers = [_SlotLayer(self) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        self._spans: list[list[int]] = []
        self._stacks: list[Tensor] = []
        """The memory of all layers, ``[layers, slots, heads, width, head]``."""
        self.reach = 0
        """The number of cached tokens that attention reads: the end of the longest row."""
        self.rows = self.ends = torch.zeros(0, dtype=torch.long)
        """Indices of the rows, and the indices of their new tokens in the slots."""

    def put(self, slots: Sequence[int], cache: Any, rows: Sequence[int], pads: Sequence[int]) -> None:
        width = cache.layers[0].keys.shape[2]
        self._reserve(max(slots) + 1, width + 1, cache.layers)
        for slot, row in zip(slots, rows, strict=True):
            self._spans[slot] = [pads[row], width]
        # One transfer to the device for all layers.
        at, of = torch.tensor([list(slots), list(rows)], device=self._stacks[0].device)
        for mine, theirs in zip(self._layers, cache.layers, strict=True):
            mine.keys[at, :, :width] = theirs.keys[of]
            mine.values[at, :, :width] = theirs.values[of]

    def _reserve(self, slots: int, width: int, like: Sequence[Any]) -> None:
        """Allocate this many slots of this width, with the heads of ``like``."""
        self._spans += [[0, 0] for _ in range(slots - len(self._spans))]
        have = (0, 0) if not self._stacks else (self._stacks[0].shape[1], self._stacks[0].shape[3])
        if slots <= have[0] and width <= have[1]:
            return
        slots = max(slots, have[0])
        wider = have[1] if width <= have[1] else max(width, have[1] * 5 // 4)
        wider = -(-wider // ROUND) * ROUND
        # Memory of one shape is one tensor, so that one copy moves a row in all layers.
        alike: dict[Any, list[tuple[_SlotLayer, str, Tensor]]] = {}
        for mine, theirs in zip(self._layers, like, strict=True):
            for name, sample in (("keys", theirs.keys), ("values", theirs.values)):
                kind = sample.shape[1], sample.shape[3], sample.dtype, sample.device
                alike.setdefault(kind, []).append((mine, name, sample))
        self._stacks = []
        for (heads, size, *_), places in alike.items():
            stack = places[0][2].new_zeros(len(places), slots, heads, wider, size)
            for new, (mine, name, _) in zip(stack, places, strict=True):
                old: Tensor | None = getattr(mine, name)
                if old is not None:
                    new[: old.shape[0], :, : old.shape[2]] = old
                setattr(mine, name, new)
                mine.is_initialized = True
            self._stacks.append(stack)

    def move(self, source: int, target: int) -> None:
        start, end = self._spans[target] = list(self._spans[source])
        for stack in self._stacks:
            stack[:, target, :, start:end] = stack[:, source, :, start:end]

    def decode(self, model: Any, tokens: Sequence[int], name: str) -> Tensor:
        count = len(tokens)
        spans = self._spans[:count]
        inputs = torch.tensor([tokens, *zip(*spans, strict=True)])
        reach = max(end for _, end in spans) + 1
        logits = self._replayed(model, inputs, reach, name)
        if logits is None:
            self._reserve(count, reach, self._layers)
            logits = self._pass(model, inputs.to(self._stacks[0].device), reach, name)
        for span in spans:
            span[1] += 1
        return logits[:count]

    def _replayed(self, model: Any, inputs: Tensor, reach: int, name: str) -> Tensor | None:
        """The logits of a pass that a graph replays; None if there is no graph."""
        graphs = self._graphs
        if graphs is None or not graphs.works:
            return None
        rows, width = padded_rows(inputs.shape[1]), padded_width(reach)
        # Slots beyond the rows are free: a pass may write to their first token, and attends to no other one there.
        self._reserve(rows, width, self._layers)
        return graphs.run(lambda padded: self._pass(model, padded, width, name), inputs, (rows, width), self._stacks)

    def _pass(self, model: Any, inputs: Tensor, width: int, name: str) -> Tensor:
        """Process a token per row.

        Args:
            inputs: ``[3, rows]``: the tokens, and the start and end of each row before them.
            width: number of cached tokens that attention reads.
        """
        ids, starts, ends = inputs
        self.reach, self.rows, self.ends = width, torch.arange(len(ids), device=ids.device), ends
        places = torch.arange(width, device=ids.device)
        attend = (places >= starts.unsqueeze(1)) & (places <= ends.unsqueeze(1))
        # A boolean mask would be converted to this one in every layer.
        mask = torch.zeros(attend.shape, dtype=self._stacks[0].dtype, device=ids.device)
        mask.masked_fill_(~attend, -torch.inf)
        out = model(
            input_ids=ids.unsqueeze(1), attention_mask=mask[:, None, None], position_ids=(ends - starts).unsqueeze(1),
            use_cache=True, logits_to_keep=1, **{name: self._cache},
        )  # fmt: skip
        logits: Tensor = out.logits[:, -1]
        return logits


class WholeCache:
    """The model's own cache, for sliding windows, recurrent layers and others. All rows begin together, and a finished
    row stays in the batch until all have finished."""

    can_join = False

    def __init__(self) -> None:
        self._cache: Any = None
        self._attend = torch.zeros(0, 0)
        self._rows: list[int] = []

    def put(self, slots: Sequence[int], cache: Any, rows: Sequence[int], pads: Sequence[int]) -> None:
        self._cache, self._rows = cache, list(rows)
        width = int(cache.get_seq_length())
        self._attend = (torch.arange(width) >= torch.tensor(pads).unsqueeze(1)).long()

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]

    def decode(self, model: Any, tokens: Sequence[int], name: str) -> Tensor:
        device = next(model.parameters()).device
        ids = torch.zeros(len(self._attend), 1, dtype=torch.long)
        rows = self._rows[: len(tokens)]
        ids[rows, 0] = torch.tensor(tokens)
        self._attend = torch.cat([self._attend.to(device), torch.ones(len(ids), 1, dtype=torch.long, device=device)], 1)
        out = model(
            input_ids=ids.to(device), attention_mask=self._attend, use_cache=True, logits_to_keep=1,
            position_ids=self._attend.sum(1, keepdim=True) - 1, **{name: self._cache},
        )  # fmt: skip
        name = "cache" if "cache" in out else "past_key_values"
        self._cache = out[name]
        logits: Tensor = out.logits[rows, -1]
        return logits
