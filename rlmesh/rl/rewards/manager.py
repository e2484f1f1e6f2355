"""`RewardManager`: a reward function for each data set, selected by the column ``data_source``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlmesh.rl.rewards import exact, gsm8k, math
from rlmesh.rl.rewards.outcomes import combine
from rlmesh.rl.rewards.reward import Response, Reward
from rlmesh.rl.rewards.scoring import Decoder, Rewards
from rlmesh.rl.types import Episode, Group, Outcome, Score

__all__ = ["RewardManager"]

RM_SCORE, SCORE = "rm_score", "score"
_BY_MODEL = "Anthropic/hh-rlhf"

ScoreFunction = Callable[..., Any]


def _select_rm_score_fn(data_source: str) -> ScoreFunction:
    """The function that scores responses to the prompts of a data set.

    Raises:
        NotImplementedError: there is none; the message names the data set.
    """
    if data_source == "openai/gsm8k":
        return gsm8k.compute_score
    if data_source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"):
        return math.compute_score
    if data_source == "Rowan/hellaswag":
        return exact.compute_score
    advice = "a reward model scores it" if data_source == _BY_MODEL else "give RewardManager(select=…)"
    raise NotImplementedError(f"no reward function for data_source={data_source!r}: {advice}")


class RewardManager(Rewards):
    """Scores each response by the function of its row's data set, or takes the score that a reward model gave.

    ::

        manager = RewardManager(tokenizer, num_examine=1)
        groups = manager(groups)

    An episode whose outcomes have ``rm_score``, the score of a reward model, keeps it, and no function is called for
    it. Otherwise the function is called with ``solution_str`` and ``ground_truth`` in a pool of processes, and its
    result becomes the outcome ``score``.

    Args:
        tokenizer: decodes responses.
        num_examine: print this many responses of each call, with their scores.
        select: function from a data source to the function that scores it; raises `NotImplementedError` for unknown
            sources.
        workers: number of processes that score.
        timeout_s: time limit for one response.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        num_examine: int = 0,
        *,
        select: Callable[[str], ScoreFunction] = _select_rm_score_fn,
        workers: int = 2,
        timeout_s: float = 10.0,
    ) -> None:
        self.select = select
        selected = Reward(_Selected(select), name=SCORE, timeout_s=timeout_s)
        super().__init__([selected], tokenizer, workers=workers, examine=num_examine)

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups, with the outcome of each episode.

        Raises:
            NotImplementedError: there is no function for a row's data source; the message names the source.
        """
        return self.score(groups)

    def outcomes(self, responses: Sequence[Response], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Outcome]]:
        """For each response, its outcome under the name ``rm_score`` or ``score``."""
        left = [place for place, one in enumerate(responses) if RM_SCORE not in one.episode.outcomes]
        for source in {rows[place].get("data_source") for place in left}:
            self.select(source)  # type: ignore[arg-type]
        scored = iter(super().outcomes([responses[place] for place in left], [rows[place] for place in left]))
        own = set(left)
        return [
            next(scored) if place in own else {RM_SCORE: one.episode.outcomes[RM_SCORE]}
            for place, one in enumerate(responses)
        ]

    def total(self, episode: Episode) -> Outcome:
        """The outcome of an episode."""
        given = {name: episode.outcomes[name] for name in (RM_SCORE, SCORE) if name in episode.outcomes}
        return combine(given, {RM_SCORE: 1.0, SCORE: 1.0})

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Numbers for the report, among them the mean score of each data source."""
        values: dict[str, list[float]] = {}
        for group in groups:
            for outcome in map(self.total, group.episodes):
                if isinstance(outcome, Score):
                    values.setdefault(f"reward/{group.row.get('data_source')}", []).append(outcome.value)
        return super().metrics(groups) | {name: sum(found) / len(found) for name, found in values.items()}


class _Selected:
    """Calls the function of a data source."""

    def __init__(self, select: Callable[[str], ScoreFunction]) -> None:
        self.select = select

    def __call__(self, solution_str: str, ground_truth: Any, data_source: str) -> Any:
        return self.select(data_source)(solution_str, ground_truth)
