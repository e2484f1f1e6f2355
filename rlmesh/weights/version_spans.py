"""`VersionSpans`: the policy version of each token of a sample."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class VersionSpans:
    """Versions of a growing sample, as spans of tokens::

        spans = VersionSpans()
        for _ in range(max_tokens):
            with weights.serving() as version:
                …                       # sample one token
            spans.add(version)
        sample = Sample(…, policy_version=spans.policy_version, version_spans=spans.spans)

    Attributes:
        spans: (version, first token, token after the last), in order, without gaps.
    """

    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, version: int, tokens: int = 1) -> None:
        """Append tokens of this version."""
        if tokens < 1:
            return
        end = len(self)
        if self.spans and self.spans[-1][0] == version:
            start = self.spans[-1][1]
            self.spans[-1] = (version, start, end + tokens)
        else:
            self.spans.append((version, end, end + tokens))

    def __len__(self) -> int:
        """The number of tokens."""
        return self.spans[-1][2] if self.spans else 0

    @property
    def policy_version(self) -> int | None:
        """The oldest version of any token, from which staleness is counted; None without tokens."""
        return min((version for version, _, _ in self.spans), default=None)

    def staleness(self, trained: int) -> int:
        """The number of versions by which the oldest token is behind the trainer's version."""
        oldest = self.policy_version
        return 0 if oldest is None else trained - oldest

    def per_token(self) -> list[int]:
        """The version of each token."""
        return [version for version, start, end in self.spans for _ in range(end - start)]
