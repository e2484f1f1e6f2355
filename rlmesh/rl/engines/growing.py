"""`Growing`: a response as it grows, over one stretch of sampling or several. Pure.

A stretch is what one version samples without a break. An engine that keeps a request over a push ends it and starts it
again with what there is so far as part of the prompt: `context` and `left` are what the next stretch begins with.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmesh import VersionSpans
from rlmesh.rl.engines.rollout import FinishReason, Sample, SamplingParams

__all__ = ["Growing"]


class Growing:
    """One response.

    Args:
        prompt: what it continues.
        params: of the request.
        row: its place in the request.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams, row: int = 0) -> None:
        self.prompt, self.params, self.row = list(prompt), params, row
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.spans = VersionSpans()
        self.finish_reason: FinishReason | None = None

    @property
    def context(self) -> list[int]:
        """What the next stretch continues."""
        return [*self.prompt, *self.tokens]

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return self.params.max_tokens - len(self.tokens)

    @property
    def seed(self) -> int | None:
        """Of the next stretch: rows and stretches draw differently, and each the same when it is run again."""
        if self.params.seed is None:
            return None
        return (self.params.seed * 1_000_003 + self.row * 8191 + len(self.tokens)) % (1 << 31)

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        """The next tokens, made by ``version``."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.spans.add(version, len(tokens))

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def sample(self) -> Sample:
        """What there is."""
        return Sample(self.prompt, self.tokens, self.log_probs, self.finish_reason or "abort", self.spans.spans)
