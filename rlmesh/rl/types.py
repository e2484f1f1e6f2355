"""Turns, episodes and groups: the output of sampling and the input of training.

An episode is a list of turns, and a turn is token ids from one source: the policy sampled them, or the environment gave
them (a prompt, a tool's answer). Masks are derived from the sources, so they cannot be wrong. Text is for people only:
nothing is tokenised twice.

The module has no torch: ids and numbers are NumPy arrays, which travel between processes without copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh.rl.engines.rollout import Sample

__all__ = ["EQUAL", "Abstain", "Episode", "Failed", "Group", "Outcome", "Score", "Source", "Turn"]

EQUAL = 1e-9
"""Rewards that differ by less are equal: a weighted sum of rewards is rounded, so that 0.7 + 0.2 + 0.1 is below 1."""

Source = Literal["policy", "environment"]
"""The source of a turn's tokens."""

INT32 = np.dtype(np.int32)

Ids = NDArray[np.int32]
Numbers = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Score:
    """A reward.

    Attributes:
        value: finite.
        metrics: numbers for the report, averaged over the samples that have them.
        reason: the reason, for people who read samples, such as ``"no answer"``.
        answer: the answer in the response, for majority votes, as a text that is the same for equal answers; ``None``:
            the response has none, or the reward does not extract it.
    """

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    answer: str | None = None

    def __post_init__(self) -> None:
        value: Any = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not np.isfinite(value):
            raise ValueError(f"a score is a finite number, got {self.value!r}")
        metrics: Any = self.metrics
        for name, number in metrics.items() if isinstance(metrics, Mapping) else [("metrics", metrics)]:
            if not isinstance(number, (bool, int, float, np.number, np.bool_)) or not np.isfinite(number):
                raise ValueError(f"metric {name!r} of a score is a finite number, got {number!r}")


@dataclass(frozen=True, slots=True)
class Abstain:
    """The outcome of a scorer that does not apply to an episode. The episode leaves its group, and is no failure.

    Attributes:
        reason: the reason, for people who read samples.
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a scorer that failed. The episode leaves its group and is counted; its reward is not 0.

    Attributes:
        reason: the cause, such as ``"timeout"`` or the text of an exception.
    """

    reason: str


Outcome = Score | Abstain | Failed
"""The result of a reward function for an episode."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Token ids from one source.

    Attributes:
        ids: ``[tokens]``, int32.
        source: the policy or the environment.
        log_probs: of a policy's turn: log-probability of each token under the sampling distribution, ``[tokens]``, in
            nats. ``None`` for an environment's turn.
        kept_log_mass: of a policy's turn under truncated sampling (top-p, top-k, min-p): the log of the probability
            mass of the kept tokens, ``[tokens]``; ``None`` without truncation.
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
        if self.ids.ndim != 1 or self.ids.dtype != INT32:
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
        if (self.version_spans[-1][2] if self.version_spans else 0) != len(self.ids):
            raise ValueError(f"{len(self.ids)} tokens need as many versions, the spans are {self.version_spans}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def whole_log_probs(self) -> Numbers:
        """``[tokens]`` of a policy's turn: log-probabilities of the whole vocabulary, at the temperature of sampling:
        those of the sampling distribution plus the mass that it kept (`rlmesh.rl.correction.whole_vocabulary`)."""
        if self.log_probs is None:
            raise ValueError("an environment's turn has no log-probabilities")
        return self.log_probs if self.kept_log_mass is None else self.log_probs + self.kept_log_mass

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
            None if sample.kept_log_mass is None else np.asarray(sample.kept_log_mass, dtype=np.float32),
            version_spans=tuple(sample.version_spans),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """The turns from a prompt to the end, and their rewards.

    Attributes:
        turns: in order; the first is the environment's, the prompt.
        finish_reason: the reason for the end of the last turn: ``"stop"``, ``"length"``, ``"time"``, ``"abort"``, or a
            value of the agent.
        outcomes: reward name → outcome.
        extras: further data of this episode, for rewards.
        failure: the reason why the episode failed, with its place, such as ``"episode 17 turn 3 tool search: no answer
            in 5 s"``. Each reward of a failed episode is `Failed`. ``""``: it did not fail.
    """

    turns: tuple[Turn, ...]
    finish_reason: str = "stop"
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""

    def __post_init__(self) -> None:
        if not self.turns or self.turns[0].source != "environment" or not len(self.turns[0]):
            raise ValueError("an episode begins with a prompt: a turn of the environment with at least one token")

    @classmethod
    def of(cls, sample: Sample) -> Episode:
        """One prompt and one response."""
        return cls.of_group([sample])[0]

    @classmethod
    def of_group(cls, samples: Sequence[Sample]) -> list[Episode]:
        """One prompt and one response each. Samples of the same prompt share its turn."""
        found: list[Episode] = []
        before, prompt = list[int](), Turn.said([])
        for sample in samples:
            ids: Any = sample.prompt_token_ids
            if not (isinstance(ids, list) and ids == before):
                before, prompt = ids, Turn.said(ids)
            found.append(cls((prompt, Turn.sampled(sample)), sample.finish_reason))
        return found

    def __len__(self) -> int:
        """The number of tokens, the prompt included."""
        return sum(map(len, self.turns))

    @property
    def prompt_ids(self) -> Ids:
        """The token ids of the first turn."""
        return self.turns[0].ids

    @property
    def ids(self) -> Ids:
        """All tokens, ``[tokens]``."""
        return np.concatenate([turn.ids for turn in self.turns])

    @property
    def mask(self) -> NDArray[np.bool_]:
        """``[tokens]``, True at the tokens that the policy sampled."""
        return np.concatenate([np.full(len(turn), turn.source == "policy") for turn in self.turns])

    @property
    def sampled_ids(self) -> Ids:
        """The tokens that the policy sampled."""
        sampled = [turn.ids for turn in self.turns if turn.source == "policy"]
        return sampled[0] if len(sampled) == 1 else np.concatenate([np.zeros(0, np.int32), *sampled])

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
    def sampled_log_probs(self) -> Numbers:
        """``[tokens]``: log-probabilities of the whole vocabulary, at the temperature of sampling: those of the
        sampling distribution plus the mass that it kept (:func:`rlmesh.rl.correction.whole_vocabulary`), for comparison
        with a trainer's own; 0 at the environment's tokens."""
        return self.per_token("log_probs") + self.per_token("kept_log_mass")

    @property
    def response_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(turn) for turn in self.turns if turn.source == "policy")

    @property
    def versions(self) -> frozenset[int]:
        """The versions that sampled tokens."""
        return frozenset(version for turn in self.turns for version, _, _ in turn.version_spans)

    def sampled_by(self, version: int) -> bool:
        """True if this version sampled all tokens of the policy."""
        return all(span[0] == version for turn in self.turns for span in turn.version_spans)

    @property
    def policy_version(self) -> int | None:
        """The oldest version of any token, from which staleness is counted; ``None`` without tokens of the policy."""
        return min((span[0] for turn in self.turns for span in turn.version_spans), default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All episodes of one prompt.

    Attributes:
        key: identifies the prompt within the run, such as (epoch, row).
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
        """The episodes of groups, group by group."""
        return [episode for group in groups for episode in group.episodes]
