"""`VersionSpans`: which tokens of a sample were made by which version of the policy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class VersionSpans:
    """Grows with a sample::

        spans = VersionSpans()
        for _ in range(max_tokens):
            with weights.serving() as version:
                …                       # one token
            spans.add(version)
        sample = Sample(…, policy_version=spans.policy_version, version_spans=spans.spans)

    Attributes:
        spans: (version, first token, token after the last), in order, without gaps.
    """

    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, version: int, tokens: int = 1) -> None:
        """The next tokens were made by this version."""
        if tokens < 1:
            return
        end = len(self)
        if self.spans and self.spans[-1][0] == version:
            start = self.spans[-1][1]
            self.spans[-1] = (version, start, end + tokens)
        else:
            self.spans.append((version, end, end + tokens))

    def __len__(self) -> int:
        """How many tokens."""
        return self.spans[-1][2] if self.spans else 0

    @property
    def policy_version(self) -> int | None:
        """The oldest version that took part: what staleness is counted from. None for no tokens."""
        return min((version for version, _, _ in self.spans), default=None)

    def staleness(self, trained: int) -> int:
        """By how many versions the oldest part is behind the trainer's."""
        oldest = self.policy_version
        return 0 if oldest is None else trained - oldest

    def per_token(self) -> list[int]:
        """The version of each token."""
        return [version for version, start, end in self.spans for _ in range(end - start)]
