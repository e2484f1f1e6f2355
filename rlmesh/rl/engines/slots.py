"""Key-value caches of a batch whose rows come and go: `SlotCache`, and `WholeCache` for models with other caches.

A slot holds the keys and values of one row at ``[start, end)`` of its memory, so that rows of any length lie side by
side, and a row takes the slot of another without a copy of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from rlmesh.rl.engines.lora import base_model_of

__all__ = ["BatchCache", "SlotCache", "WholeCache", "cache_for", "prefill"]

ROUND = 128
"""Slots grow by multiples of this many tokens."""


class BatchCache(Protocol):
    """Keys and values of the rows of a batch, one slot for each.

    Attributes:
        can_join: true if rows may come while others are under way.
    """

    can_join: bool

    def put(self, slots: Sequence[int], cache: Any, rows: Sequence[int], pads: Sequence[int]) -> None:
        """Take rows of a prefilled cache (padded on the left by ``pads`` tokens) into slots."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copy a slot over another."""
        ...

    def decode(self, model: Any, tokens: Sequence[int], name: str) -> Tensor:
        """Process one token of each of the first slots; returns logits ``[slots, vocabulary]`` of the next tokens."""
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


def cache_for(model: Any, cache: Any) -> BatchCache:
    """The cache of a batch, by what the model's own cache is: rows can join where all layers keep all keys."""
    plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
    config = getattr(base_model_of(model), "config", None)
    # The mask of four dimensions that slots need is one of torch's attention.
    attention = getattr(config, "_attn_implementation", "")
    return SlotCache(len(cache.layers)) if plain and attention in ("sdpa", "rlmesh_packed") else WholeCache()


class _SlotLayer(DynamicLayer):
    """One layer's memory, ``[slots, heads, width, head]``; ``update`` writes one token per row at the row's end."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    def grow(self, like: tuple[Tensor, Tensor], slots: int, width: int) -> None:
        for name, sample in zip(("keys", "values"), like, strict=True):
            old: Tensor | None = getattr(self, name)
            new = sample.new_zeros(slots, sample.shape[1], width, sample.shape[3])
            if old is not None:
                new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)
        self.is_initialized = True

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
    """Slots for the layers of a model whose layers keep the keys and values of all tokens."""

    can_join = True

    def __init__(self, layers: int) -> None:
        self._layers = [_SlotLayer(self) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        self._spans: list[list[int]] = []
        self.reach = 0
        """The width of what attention reads: the end of the longest row."""
        self.rows = self.ends = torch.zeros(0, dtype=torch.long)
        """Indices of the rows, and the places of their new tokens."""

    def put(self, slots: Sequence[int], cache: Any, rows: Sequence[int], pads: Sequence[int]) -> None:
        width = cache.layers[0].keys.shape[2]
        self._reserve(max(slots) + 1, width + 1, cache.layers)
        for slot, row in zip(slots, rows, strict=True):
            self._spans[slot] = [pads[row], width]
        for mine, theirs in zip(self._layers, cache.layers, strict=True):
            at, of = torch.tensor(slots, device=theirs.keys.device), torch.tensor(rows, device=theirs.keys.device)
            mine.keys[at, :, :width] = theirs.keys[of]  # type: ignore[index]
            mine.values[at, :, :width] = theirs.values[of]  # type: ignore[index]

    def _reserve(self, slots: int, width: int, like: Sequence[Any]) -> None:
        held = self._layers[0].keys
        have = (0, 0) if held is None else (held.shape[0], held.shape[2])
        self._spans += [[0, 0] for _ in range(slots - len(self._spans))]
        if slots <= have[0] and width <= have[1]:
            return
        slots = max(slots, have[0])
        wider = have[1] if width <= have[1] else max(width, have[1] * 5 // 4)
        wider = -(-wider // ROUND) * ROUND
        for mine, theirs in zip(self._layers, like, strict=True):
            mine.grow((theirs.keys, theirs.values), slots, wider)

    def move(self, source: int, target: int) -> None:
        start, end = self._spans[target] = list(self._spans[source])
        for layer in self._layers:
            for memory in (layer.keys, layer.values):
                assert memory is not None
                memory[target, :, start:end] = memory[source, :, start:end]

    def decode(self, model: Any, tokens: Sequence[int], name: str) -> Tensor:
        count = len(tokens)
        spans = self._spans[:count]
        self.reach = max(end for _, end in spans) + 1
        self._reserve(count, self.reach, self._layers)
        memory = self._layers[0].keys
        assert memory is not None
        ids, starts, ends = torch.tensor([tokens, *zip(*spans, strict=True)], device=memory.device)
        self.rows, self.ends = torch.arange(count, device=memory.device), ends
        places = torch.arange(self.reach, device=memory.device)
        mask = (places >= starts.unsqueeze(1)) & (places <= ends.unsqueeze(1))
        out = model(
            input_ids=ids.unsqueeze(1), attention_mask=mask[:, None, None], position_ids=(ends - starts).unsqueeze(1),
            use_cache=True, logits_to_keep=1, **{name: self._cache},
        )  # fmt: skip
        for span in spans:
            span[1] += 1
        logits: Tensor = out.logits[:, -1]
        return logits


class WholeCache:
    """The model's own cache, for sliding windows, recurrent layers and others: rows begin together, and a row that has
    ended stays in the batch until all have."""

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
