"""Turns, episodes and groups: what sampling gives and training takes.

An episode is a list of turns, and a turn is token ids with one source: the policy chose them, or the environment said
them (a prompt, a tool's answer). Masks are derived from that and cannot be given wrongly. Text is a view for people:
nothing is ever tokenised twice.

No torch here: ids and numbers are NumPy arrays, so that they travel between processes without copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh import VersionSpans
from rlmesh.rl.engines.rollout import Sample

__all__ = ["Abstain", "Episode", "Failed", "Group", "Outcome", "Score", "Source", "Turn"]

Source = Literal["policy", "environment"]
"""Who chose the tokens of a turn."""

Ids = NDArray[np.int32]
Numbers = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Score:
    """A reward.

    Attributes:
        value: finite.
        metrics: numbers for the report, averaged over the samples that have them.
        reason: for people who read samples, such as ``"no answer"``.
    """

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def __post_init__(self) -> None:
        value: Any = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not np.isfinite(value):
            raise ValueError(f"a score is a finite number, got {self.value!r}")


@dataclass(frozen=True, slots=True)
class Abstain:
    """The scorer has no opinion on this episode: it takes no part in its group, and is no failure.

    Attributes:
        reason: for the count in the report.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The scorer failed on this episode: it takes no part in its group, and is counted. It never becomes 0.

    Attributes:
        reason: what happened, such as ``"timeout"`` or the text of an exception.
    """

    reason: str


Outcome = Score | Abstain | Failed
"""What a reward function says of an episode."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Token ids with one source.

    Attributes:
        ids: ``[tokens]``, int32.
        source: who chose them.
        log_probs: of a policy's turn: log-probability of each token under the distribution that was sampled from,
            ``[tokens]``, in nats. ``None`` for an environment's turn.
        kept_log_mass: of a policy's turn under truncated sampling (top-p, top-k, min-p): the log of the mass of the
            kept tokens, ``[tokens]``; ``None`` where nothing was left out.
        version_spans: of a policy's turn: (version, first token, token after the last), in order and without gaps.
    """

    ids: Ids
    source: Source
    log_probs: Numbers | None = None
    kept_log_mass: Numbers | None = None
    version_spans: Sequence[tuple[int, int, int]] = ()

    def __post_init__(self) -> None:
        if self.source not in ("policy", "environment"):
            raise ValueError(f"the source of a turn is 'policy' or 'environment', got {self.source!r}")
        if self.ids.ndim != 1 or self.ids.dtype != np.int32:
            raise ValueError(f"ids are one row of int32, got {self.ids.dtype} of shape {self.ids.shape}")
        if self.source == "environment":
            if self.log_probs is not None or self.kept_log_mass is not None or self.version_spans:
                raise ValueError("an environment's turn has no log-probabilities and no versions: nobody sampled it")
            return
        if self.log_probs is None or self.log_probs.shape != self.ids.shape:
            given = None if self.log_probs is None else self.log_probs.shape
            raise ValueError(f"a policy's turn of {len(self.ids)} tokens needs as many log-probabilities, got {given}")
        if self.kept_log_mass is not None and self.kept_log_mass.shape != self.ids.shape:
            raise ValueError(f"{len(self.ids)} tokens need as many masses, got {self.kept_log_mass.shape}")
        if len(VersionSpans(list(self.version_spans))) != len(self.ids):
            raise ValueError(f"{len(self.ids)} tokens need as many versions, the spans are {self.version_spans}")

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def said(cls, ids: ArrayLike) -> Turn:
        """A turn of the environment."""
        return cls(np.asarray(ids, dtype=np.int32), "environment")

    @classmethod
    def sampled(cls, sample: Sample) -> Turn:
        """The response of an engine's sample, as a turn of the policy."""
        return cls(
            np.asarray(sample.token_ids, dtype=np.int32),
            "policy",
            np.asarray(sample.log_probs, dtype=np.float32),
            version_spans=tuple(sample.version_spans),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """The turns from a prompt to the end, and what is known of them.

    Attributes:
        turns: in order; the first is the environment's, the prompt.
        finish_reason: why the last turn ended: ``"stop"``, ``"length"``, ``"abort"``, or a name of the agent's own.
        outcomes: what each reward said, by its name.
        extras: whatever a user wants to keep with the episode.
    """

    turns: tuple[Turn, ...]
    finish_reason: str = "stop"
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.turns or self.turns[0].source != "environment" or not len(self.turns[0]):
            raise ValueError("an episode begins with a prompt: a turn of the environment with at least one token")

    @classmethod
    def of(cls, sample: Sample) -> Episode:
        """One prompt and one response."""
        return cls((Turn.said(sample.prompt_token_ids), Turn.sampled(sample)), sample.finish_reason)

    def __len__(self) -> int:
        """How many tokens, the prompt included."""
        return sum(map(len, self.turns))

    @property
    def prompt_ids(self) -> Ids:
        """The first turn."""
        return self.turns[0].ids

    @property
    def ids(self) -> Ids:
        """All tokens, ``[tokens]``."""
        return np.concatenate([turn.ids for turn in self.turns])

    @property
    def mask(self) -> NDArray[np.bool_]:
        """``[tokens]``, True at the tokens that the policy chose."""
        return np.concatenate([np.full(len(turn), turn.source == "policy") for turn in self.turns])

    def per_token(self, name: Literal["log_probs", "kept_log_mass"]) -> Numbers:
        """``[tokens]``: the turns' numbers, 0 at the environment's tokens and where a turn has none."""
        rows = [getattr(turn, name) for turn in self.turns]
        return np.concatenate(
            [
                np.zeros(len(turn), np.float32) if row is None else row
                for turn, row in zip(self.turns, rows, strict=True)
            ]
        )

    @property
    def response_tokens(self) -> int:
        """How many tokens the policy chose."""
        return sum(len(turn) for turn in self.turns if turn.source == "policy")

    @property
    def policy_version(self) -> int | None:
        """The oldest version that took part, which staleness is counted from. ``None``: the policy chose nothing."""
        return min((span[0] for turn in self.turns for span in turn.version_spans), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All episodes of one prompt.

    Attributes:
        key: names the prompt within the run, such as (epoch, row).
        episodes: at least one; they may share more than the prompt.
        row: the data set's row, for rewards.
    """

    key: tuple[int, ...]
    episodes: tuple[Episode, ...]
    row: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.episodes:
            raise ValueError(f"group {self.key} has no episode")

    def __len__(self) -> int:
        return len(self.episodes)

    @staticmethod
    def episodes_of(groups: Iterable[Group]) -> list[Episode]:
        """All episodes, group by group."""
        return [episode for group in groups for episode in group.episodes]
