"""`ContinuousBatch`: samples responses together; when one ends, another request takes its slot.

A batch that waits for its longest response computes rows that have ended: with log-normal lengths, these are most rows
most of the time. Continuous batching (Yu et al. 2022, "Orca", OSDI) fills a slot as soon as its row has ended. Each row
has a generator of its own, so its tokens do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlmesh.rl.engines.decode_graphs import DecodeGraphs
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.sampling import SampledTokens, draw, penalised
from rlmesh.rl.engines.slots import BatchCache, cache_for, prefill

__all__ = ["ContinuousBatch"]

PREFILL_TOKENS = 16_384
"""The most tokens, padding included, of one pass over prompts."""

HELD_STEPS, HELD_SHARE = 8, 16
"""With CUDA graphs, the prompt of a new row takes as long as many steps. So new rows wait until there is one for every
``HELD_SHARE`` rows that are sampled, but at most ``HELD_STEPS`` steps, and are processed together."""


class _Row:
    """A response in the batch: its generator, and its token counts if it has penalties."""

    def __init__(self, growing: Growing, vocabulary: int, device: torch.device) -> None:
        self.growing = growing
        self.generator = torch.Generator(device=device)
        if growing.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(growing.seed)
        params = growing.params
        self.kind = (
            params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty,
            params.presence_penalty, params.frequency_penalty,
        )  # fmt: skip
        self.seen = self.counts = torch.zeros(0)
        if params.penalises:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.counts = torch.zeros(vocabulary, dtype=torch.int32, device=device)
            self.note(growing.prompt, growing.tokens)

    def note(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Count tokens of the prompt and of the response."""
        if self.growing.params.penalises:
            self.seen[[*prompt, *tokens]] = True
            for token in tokens:
                self.counts[token] += 1


class ContinuousBatch:
    """Not thread-safe.

    Args:
        model: a causal language model of transformers, in eval mode.
        stop_token_ids: tokens that end any response.
        pad: token id of padding.
        most_rows: the most rows that are sampled together.
        graphs: replays decode passes as CUDA graphs; the cache then is kept until `drop`. None: passes run without
            graphs.
    """

    def __init__(
        self, model: Any, *, stop_token_ids: Sequence[int], pad: int = 0, most_rows: int = 64,
        graphs: DecodeGraphs | None = None,
    ) -> None:  # fmt: skip
        self._model, self._pad, self._most, self._graphs = model, pad, most_rows, graphs
        self._stops = frozenset(stop_token_ids)
        self._device = next(model.parameters()).device
        self._rows: list[_Row] = []
        self._new: list[_Row] = []
        self._cache: BatchCache | None = None
        self._name = ""
        self._version: int | None = None
        self._held = 0
        """Steps that new rows have waited."""
        self._vocabulary = 0
        self._share = True
        """True: equal prompts are processed once. This needs a cache whose rows can be copied to several slots."""

    @property
    def rows(self) -> list[Growing]:
        """The responses that have not ended."""
        return [row.growing for row in (*self._rows, *self._new)]

    @property
    def room(self) -> int:
        """The number of responses that may be added now."""
        if self._rows and self._cache is not None and not self._cache.can_join:
            return 0
        return max(self._most - len(self._rows) - len(self._new), 0)

    def add(self, growing: Growing) -> None:
        """Add a response; its prompt is processed by the next step."""
        if not self._vocabulary:
            self._vocabulary = _width_of_logits(self._model)
        self._new.append(_Row(growing, self._vocabulary, self._device))

    def remove(self, gone: Callable[[Growing], bool]) -> list[Growing]:
        """Take out the responses for which ``gone`` is true."""
        out = [row.growing for row in (*self._rows, *self._new) if gone(row.growing)]
        self._new = [row for row in self._new if not gone(row.growing)]
        self._keep([not gone(row.growing) for row in self._rows])
        return out

    def restart(self) -> None:
        """Compute the cache anew, since the weights have changed."""
        self._new, self._rows = [*self._rows, *self._new], []
        self.free()

    def free(self) -> None:
        """Free the memory of the cache, if neither a response nor a graph needs it."""
        if not self._rows and (self._graphs is None or not self._graphs.count):
            self._cache = None

    def drop(self) -> None:
        """Free the memory of the cache and of all graphs; only without responses."""
        self._cache = None
        if self._graphs is not None:
            self._graphs.clear()

    @torch.no_grad()
    def step(self, version: int) -> list[Growing]:
        """Sample a token of each response (two of a new one); returns the responses that end.

        Args:
            version: version of the weights. After a change of the weights, call `restart` first.
        """
        self._version = version
        ended: list[Growing] = []
        parts = [] if self._holds() else _parts(self._new)
        if parts:
            self._new, self._held = [], 0
        for part in parts:
            if self._rows and self._cache is not None and not self._cache.can_join:
                self._new += part
            else:
                ended += self._begin(part)
        if self._rows:
            assert self._cache is not None
            tokens = [row.growing.last for row in self._rows]
            ended += self._take(self._rows, self._cache.decode(self._model, tokens, self._name))
            self._keep([row.growing.finish_reason is None for row in self._rows])
        return ended

    def _holds(self) -> bool:
        """True if new rows wait for others."""
        if self._graphs is None or not self._graphs.count or not self._new:
            return False
        self._held += 1
        return self._held <= HELD_STEPS and len(self._new) * HELD_SHARE < len(self._rows)

    def _begin(self, rows: list[_Row]) -> list[Growing]:
        """Process the contexts of new rows, and sample a token of each."""
        contexts = [tuple(row.growing.context) for row in rows]
        different = list(dict.fromkeys(contexts)) if self._share else contexts
        logits, cache, pads, self._name = prefill(self._model, different, self._pad, self._device)
        if self._cache is None or not self._cache.can_join:
            self._cache = cache_for(self._model, cache, self._graphs)
            if not self._cache.can_join and len(different) < len(rows):
                self._share = False
                return self._begin(rows)
        places = {context: place for place, context in enumerate(different)}
        of = [places[context] for context in contexts] if self._share else list(range(len(rows)))
        ended = self._take(rows, logits[of])
        left = [place for place, row in enumerate(rows) if row.growing.finish_reason is None]
        if left:
            first = len(self._rows)
            self._rows += [rows[place] for place in left]
            self._cache.put(range(first, len(self._rows)), cache, [of[place] for place in left], pads)
        return ended

    def _take(self, rows: Sequence[_Row], logits: Tensor) -> list[Growing]:
        """Sample a token of each row from its logits; returns the responses that end."""
        drawn = _draw(rows, logits)
        # One transfer from the device for all three.
        numbers = torch.stack([drawn.tokens.double(), drawn.log_probs.double(), drawn.kept_log_mass.double()]).tolist()
        ended = []
        assert self._version is not None
        for row, token, log_prob, mass in zip(rows, map(int, numbers[0]), *numbers[1:], strict=True):
            growing = row.growing
            growing.add([token], [log_prob], self._version, [mass] if growing.params.truncates else ())
            row.note((), [token])
            if token in self._stops or token in growing.params.stop_token_ids:
                growing.finish("stop")
            elif growing.finish_reason is None and not growing.left:
                growing.finish("length")
            if growing.finish_reason is not None:
                ended.append(growing)
        return ended

    def _keep(self, stays: Sequence[bool]) -> None:
        """Drop rows; the last rows take their slots."""
        count = len(self._rows)
        for slot in (place for place, kept in enumerate(stays) if not kept):
            while count > slot and not stays[count - 1]:
                count -= 1
            if slot >= count:
                break
            count -= 1
            self._rows[slot] = self._rows[count]
            assert self._cache is not None
            self._cache.move(count, slot)
        del self._rows[count:]


def _parts(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Groups of rows with similar lengths, each small enough for one pass."""
    parts: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.growing.context)):
        # The first row of a part is its longest.
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0].growing.context) <= PREFILL_TOKENS:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _draw(rows: Sequence[_Row], logits: Tensor) -> SampledTokens:
    """Sample a token per row, with each row's own parameters."""
    kinds: dict[tuple[float, ...], list[int]] = {}
    for place, row in enumerate(rows):
        kinds.setdefault(row.kind, []).append(place)
    if len(kinds) == 1:
        return _draw_alike(rows, logits)
    found: list[SampledTokens] = []
    places: list[int] = []
    for alike in kinds.values():
        found.append(_draw_alike([rows[place] for place in alike], logits[alike]))
        places += alike
    order = torch.tensor(places, device=logits.device).argsort()
    return SampledTokens(*(torch.cat(parts)[order] for parts in zip(*found, strict=True)))


def _draw_alike(rows: Sequence[_Row], logits: Tensor) -> SampledTokens:
    params: SamplingParams = rows[0].growing.params
    if params.penalises:
        seen, counts = torch.stack([row.seen for row in rows]), torch.stack([row.counts for row in rows])
        logits = penalised(logits, params, seen=seen, counts=counts)
    return draw(logits, params, [row.generator for row in rows])


def _width_of_logits(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.weight.shape[0])
