"""Attention over a pack: each segment attends to itself causally, and to its whole prefix.

On CUDA, torch's variable-length kernel computes all segments in half precision: keys and values of a prefix are
repeated per segment, queries and everything outside of attention are not. On CPU, and on CUDA in full precision, short
segments of similar length are batched in one call with a small mask; long segments are computed one by one, in blocks
of queries, so that no mask is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlmesh.rl.packing import Segment

__all__ = ["PrefixLayout", "kernel_dtype", "packed_attention"]

LONG = 1024
"""Segments that attend to more tokens than this are computed alone, in blocks of this many queries."""
WASTE = 0.25
"""The largest share of a batched call's scores that may be padding."""


class _Batch(NamedTuple):
    """Short segments in one call.

    Attributes:
        queries: ``[segments, longest]``, token indices; the padding repeats the segment's last token.
        keys: ``[segments, longest]``, likewise.
        mask: ``[segments, 1, queries, keys]``, True where a query attends to a key; a padded query attends to all keys
            of its segment.
        where: ``[tokens of the segments]``, indices of real queries in the flattened ``queries``.
        tokens: ``[tokens of the segments]``, the token of each real query.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor
    where: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLayout:
    """The prepared segments of a pack, used by the attention of every layer.

    Attributes:
        tokens: length of the pack.
        segments: as given.
        batches: short segments, for calls with masks.
        alone: long segments, for calls with masks.
        query_starts, key_starts: ``[segments + 1]``, int32, for the variable-length kernel.
        key_tokens: ``[keys]``, the token index of each key; ``None`` if no segment has a prefix, so that the keys are
            all tokens in order.
        longest_query, longest_keys: of any segment.
    """

    tokens: int
    segments: tuple[Segment, ...]
    batches: tuple[_Batch, ...] = ()
    alone: tuple[Segment, ...] = ()
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    key_tokens: Tensor | None = None
    longest_query: int = 0
    longest_keys: int = 0
    _with_masks: list[PrefixLayout] = field(default_factory=list, repr=False)
    """The layout for calls with masks, made when a layer of full precision needs it."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device | str) -> PrefixLayout:
        """Prepare ``segments`` for a device."""
        kept = tuple(segment for segment in segments if segment.length)
        tokens = sum(segment.length for segment in kept)
        keys = [s.prefix_length + s.length for s in kept]
        if torch.device(device).type == "cpu":
            short = [s for s in kept if s.prefix_length + s.length <= LONG]
            alone = tuple(s for s in kept if s.prefix_length + s.length > LONG)
            return cls(tokens, kept, tuple(_batches(short)), alone, longest_keys=max(keys, default=0))
        prefixed = any(s.prefix_length for s in kept)
        return cls(
            tokens,
            kept,
            query_starts=_starts([s.length for s in kept]).to(device),
            key_starts=_starts(keys).to(device),
            key_tokens=torch.cat([_keys(s) for s in kept]).to(device) if prefixed else None,
            longest_query=max((s.length for s in kept), default=0),
            longest_keys=max(keys, default=0),
        )

    def with_masks(self, device: torch.device) -> PrefixLayout:
        """The layout of the same segments for calls with masks on a device."""
        if self.query_starts is None:
            return self
        if not self._with_masks:
            made = PrefixLayout.of(self.segments, "cpu")
            batches = tuple(_Batch(*(one.to(device) for one in batch)) for batch in made.batches)
            self._with_masks.append(replace(made, batches=batches))
        return self._with_masks[0]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, *, scale: float | None = None
) -> Tensor:
    """Softmax attention of each segment over its prefix and itself.

    Args:
        query: ``[heads, tokens, width]``.
        key, value: ``[key heads, tokens, width]``; the heads of queries are a multiple of these (grouped queries).
        layout: of the pack.
        scale: of the scores; ``None``: 1 / √width.

    Returns:
        ``[tokens, heads, width]``.

    Raises:
        ValueError: the pack has another number of tokens.
    """
    if query.shape[1] != layout.tokens:
        raise ValueError(f"the layout is of {layout.tokens} tokens, the query of {query.shape[1]}")
    dtype = kernel_dtype(query) if query.device.type == "cuda" else None
    if dtype is None:
        return _by_masks(query, key, value, layout.with_masks(query.device), scale)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    from torch.nn.attention.varlen import varlen_attn

    assert layout.query_starts is not None and layout.key_starts is not None
    rows = [x.transpose(0, 1) for x in (key, value)]
    if layout.key_tokens is not None:
        rows = [x.index_select(0, layout.key_tokens) for x in rows]
    grouped: dict[str, Any] = {}
    if (repeats := query.shape[0] // key.shape[0]) > 1:
        if "enable_gqa" in signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:  # torch before 2.12
            rows = [x.repeat_interleave(repeats, 1) for x in rows]
    keys, values = (x.contiguous() for x in rows)
    result = varlen_attn(
        query.transpose(0, 1).contiguous(),
        keys,
        values,
        layout.query_starts,
        layout.key_starts,
        layout.longest_query,
        layout.longest_keys,
        scale=scale,
        window_size=(-1, 0),
        **grouped,
    )
    assert isinstance(result, Tensor)  # torch returns a tuple only if further outputs are requested
    return result


def kernel_dtype(query: Tensor) -> torch.dtype | None:
    """The half precision for the variable-length kernel; ``None``: full precision, which the kernel does not support.

    Under autocast, queries may still be float32: the rotary embedding returns float32, and autocast does not know the
    kernel.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype if query.dtype in (torch.float16, torch.bfloat16) else None


def _by_masks(query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, scale: float | None) -> Tensor:
    grouped = query.shape[0] != key.shape[0]
    places, results = [], []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)

    for batch in layout.batches:
        # index_select of whole tokens: its gradient is much faster than that of indexing.
        q, k, v = (
            x.transpose(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
            for x, index in ((query, batch.queries), (key, batch.keys), (value, batch.keys))
        )
        rows = attend(q, k, v, batch.mask).transpose(1, 2).flatten(0, 1)
        results.append(rows.index_select(0, batch.where))
        places.append(batch.tokens)
    for segment in layout.alone:
        own = slice(segment.start, segment.start + segment.length)
        places.append(torch.arange(own.start, own.stop, device=query.device))
        if not segment.prefix_length:
            q, k, v = (x[:, own].unsqueeze(0) for x in (query, key, value))
            results.append(attend(q, k, v, None)[0].transpose(0, 1))
            continue
        seen = _keys(segment).to(query.device)
        k, v = (x[:, seen].unsqueeze(0) for x in (key, value))
        for first in range(0, segment.length, LONG):
            last = min(first + LONG, segment.length)
            q = query[:, own.start + first : own.start + last].unsqueeze(0)
            upto = segment.prefix_length + last
            mask = torch.arange(upto) <= segment.prefix_length + torch.arange(first, last).unsqueeze(1)
            mask = mask.to(query.device)
            results.append(attend(q, k[:, :, :upto], v[:, :, :upto], mask)[0].transpose(0, 1))
    if not results:
        return query.transpose(0, 1)
    order = torch.cat(places).argsort()
    return torch.cat(results).index_select(0, order)


def _batches(segments: Sequence[Segment]) -> list[_Batch]:
    """Segments by length, in batches that waste at most `WASTE` of their scores."""
    if not segments:
        return []
    table = np.array(segments, dtype=np.int64)  # start, length, start and length of the prefix
    lengths, keys = table[:, 1], table[:, 1] + table[:, 3]
    order = np.lexsort((lengths, keys))
    edges = [0]
    first = longest = real = 0
    for place, (length, seen) in enumerate(zip(lengths[order].tolist(), keys[order].tolist(), strict=True)):
        # This segment has at least as many keys as the segments before.
        query, scores = max(longest, length), real + length * seen
        padded = (place - first + 1) * query * seen
        # Many tiny segments are cheaper padded than called one by one.
        if place > first and padded - scores > max(WASTE * padded, 64 * 64):
            edges.append(place)
            first, query, scores = place, length, length * seen
        longest, real = query, scores
    sorted_table = table[order]
    return [_batch(sorted_table[start:end]) for start, end in pairwise([*edges, len(order)])]


def _batch(rows: np.ndarray[Any, Any]) -> _Batch:
    """A batch of the segments in the rows, ``[segments, 4]``: start, length, start and length of the prefix."""
    q, k = torch.arange(rows[:, 1].max()), torch.arange((rows[:, 1] + rows[:, 3]).max())
    starts, lengths, prefix_starts, prefixes = torch.from_numpy(rows).unsqueeze(2).unbind(1)
    queries = starts + torch.minimum(q, lengths - 1)
    keys = torch.where(k < prefixes, prefix_starts + k, starts + torch.minimum(k - prefixes, lengths - 1))
    real = q < lengths
    attends = (k <= prefixes.unsqueeze(1) + q.unsqueeze(1)) & (k < (prefixes + lengths).unsqueeze(1))
    # A padded query attends to all tokens of its segment, since a row without keys would be NaN.
    where = real.flatten().nonzero().squeeze(1)
    return _Batch(queries, keys, attends.unsqueeze(1), where, queries.flatten()[where])


def _keys(segment: Segment) -> Tensor:
    """The tokens to which a segment attends, in order."""
    prefix = torch.arange(segment.prefix_start, segment.prefix_start + segment.prefix_length)
    return torch.cat([prefix, torch.arange(segment.start, segment.start + segment.length)])


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
