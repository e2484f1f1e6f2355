"""`Growing`: an unfinished response, sampled in one stretch or several. No I/O.

A stretch is a run of tokens that one version samples without interruption. An engine that keeps a request over a push
ends the request and starts another, with the tokens so far as part of the prompt: `context` is its prompt, and `left`
its token limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmesh import VersionSpans
from rlmesh.rl.engines.rollout import FinishReason, Sample, SamplingParams

__all__ = ["Growing"]


class Growing:
    """An unfinished response.

    Args:
        prompt: the prompt's token ids.
        params: of the request.
        row: index of the response in the request.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams, row: int = 0) -> None:
        self.prompt, self.params, self.row = list(prompt), params, row
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.spans = VersionSpans()
        self.finish_reason: FinishReason | None = None

    @property
    def context(self) -> list[int]:
        """The prompt of the next stretch."""
        return [*self.prompt, *self.tokens]

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

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        """Append tokens that ``version`` sampled."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.spans.add(version, len(tokens))

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def sample(self) -> Sample:
        """The response so far, as a sample."""
        return Sample(self.prompt, self.tokens, self.log_probs, self.finish_reason or "abort", self.spans.spans)
