"""`Growing`: an unfinished response, sampled in one or several stretches. No I/O.

A stretch is a sequence of tokens that one version samples without interruption. To continue a response after a push, an
engine ends its request and starts another one, whose prompt includes the tokens so far: `context` is that prompt, and
`left` the number of tokens that may still come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rlmesh import VersionSpans
from rlmesh.rl.engines.rollout import FinishReason, OnTokens, Sample, SamplingParams

__all__ = ["Decode", "Growing", "completes", "decoder"]

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens included."""


def decoder(tokenizer: Any) -> Decode:
    """A function that decodes token ids with a tokenizer of transformers, special tokens included."""

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode


def completes(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """True if the last token completes one of the stop texts.

    A token has at least one byte of text. So it is enough to decode as many of the last tokens as the longest stop text
    has bytes, and a few more for an incomplete character.
    """
    if not stop or not tokens:
        return False
    window = max(len(text.encode()) for text in stop) + 4
    found = decode(tokens[-window:])
    return any(text in found for text in stop)


class Growing:
    """An unfinished response.

    Args:
        prompt: the prompt's token ids; a list is kept as it is.
        params: parameters of the request.
        row: index of the response in the request.
        decode: decodes tokens, for the stop texts of the request.
        on_tokens: called with the tokens that are added.
    """

    sampled: ClassVar[int] = 0
    """Approximate number of tokens that all responses of this process have got: it stops to grow when sampling
    stops."""

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, row: int = 0, decode: Decode | None = None,
        on_tokens: OnTokens | None = None,
    ) -> None:  # fmt: skip
        # The samples of a group share the list of their prompt, which then travels to the trainer once.
        self.prompt = prompt if isinstance(prompt, list) else list(prompt)
        self.params, self.row, self.decode = params, row, decode
        self.on_tokens = on_tokens
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.kept_log_mass: list[float] = []
        self.spans = VersionSpans()
        self.finish_reason: FinishReason | None = None
        self.ends_at = math.inf
        """The time at which the time limit ends the response; infinite before its first token, and without a limit."""

    @property
    def context(self) -> list[int]:
        """The prompt of the next stretch."""
        return [*self.prompt, *self.tokens]

    @property
    def last(self) -> int:
        """The last token of the context."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def left(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.params.max_tokens - len(self.tokens)

    @property
    def seed(self) -> int | None:
        """The seed of the next stretch: different for each row and stretch, and reproducible."""
        if self.params.seed is None:
            return None
        return (self.params.seed * 1_000_003 + self.row * 8191 + len(self.tokens)) % (1 << 31)

    def add(
        self, tokens: Sequence[int], log_probs: Sequence[float], version: int, kept_log_mass: Sequence[float] = ()
    ) -> None:
        """Append tokens that ``version`` sampled. A stop text ends the response, and later tokens are dropped.

        Args:
            kept_log_mass: a number per token, if the request truncates the distribution; see `Sample`.
        """
        if self.finish_reason is not None:
            return
        count = len(tokens)
        if self.params.stop and self.decode is not None:
            for place in range(len(tokens)):
                if completes([*self.tokens, *tokens[: place + 1]], self.params.stop, self.decode):
                    count = place + 1
                    self.finish("stop")
                    break
        Growing.sampled += count
        self.tokens += tokens[:count]
        self.log_probs += log_probs[:count]
        self.kept_log_mass += kept_log_mass[:count]
        self.spans.add(version, count)
        if self.on_tokens is not None and count:
            self.on_tokens(tokens[:count], log_probs[:count])

    def begin_time(self, now: float) -> None:
        """Let the time limit count from now on, in seconds, unless it does so already."""
        if self.params.time_limit_s is not None and self.ends_at == math.inf:
            self.ends_at = now + self.params.time_limit_s

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def sample(self) -> Sample:
        """The response so far, as a sample."""
        kept = self.kept_log_mass if self.params.truncates else None
        return Sample(self.prompt, self.tokens, self.log_probs, self.finish_reason or "abort", self.spans.spans, kept)
