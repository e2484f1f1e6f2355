"""`Rewards`: all rewards of a run, applied to the groups of a batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rlmesh import RoleGroup
from rlmesh.errors import UsageError
from rlmesh.rl.data.loader import Prompts
from rlmesh.rl.rewards.coroutines import failure_of, put_outcomes, run_together
from rlmesh.rl.rewards.model import RewardModel
from rlmesh.rl.rewards.outcomes import combine, metrics_of
from rlmesh.rl.rewards.process_pool import ScoringPool
from rlmesh.rl.rewards.reward import Response, Reward, ground_truth_of
from rlmesh.rl.types import Abstain, Episode, Failed, Group, Outcome, Score

__all__ = ["Decoder", "Rewards", "lacking", "unscored"]

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """The part of a tokenizer that rewards need; tokenizers of transformers have it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...


class Rewards:
    """Scores the episodes of groups, all at once.

    Functions run in a pool of processes, async functions together on an event loop, inline functions on the calling
    thread. Reward models score in their roles at the same time.

    Args:
        rewards: at least one; names must differ.
        tokenizer: decodes responses.
        workers: number of processes of the pool.
        memory_bytes: memory limit of each process (:class:`rlmesh.rl.rewards.process_pool.ScoringPool`).
        examine: print this many scored responses of each batch, spread over it.
        group: function from the name of a role to its members; finds the roles of reward models.
        required: False allows no reward at all; each episode then abstains.
        prompt_key: the column of the prompts, for reward models.

    Raises:
        UsageError: no reward, or two of one name.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | RewardModel],
        tokenizer: Decoder,
        *,
        workers: int = 2,
        memory_bytes: int = 2 * 2**30,
        examine: int = 0,
        group: Callable[[str], Any] = RoleGroup,
        required: bool = True,
        prompt_key: str = "prompt",
    ) -> None:
        names = [reward.name for reward in rewards]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"two rewards are named {', '.join(sorted(twice))}: give Reward(…, name=…)")
        if required and not rewards:
            raise UsageError("no reward given")
        self.rewards = {reward.name: reward for reward in rewards}
        self._weights = {reward.name: reward.weight for reward in rewards}
        self.tokenizer, self.examine, self._group = tokenizer, examine, group
        self._pools: dict[float, ScoringPool] = {}
        self._lock = threading.Lock()
        """Held while a pool is made, and while an inline function runs: `score` may be called on several threads."""
        self._workers, self._memory_bytes, self._prompt_key = workers, memory_bytes, prompt_key

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pools": {}, "_lock": None}  # another process makes pools of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def response(self, episode: Episode) -> Response:
        """The `Response` of an episode."""
        return self.responses([episode])[0]

    def responses(self, episodes: Sequence[Episode]) -> list[Response]:
        """The `Response` of each episode. A prompt that several have is decoded once."""
        prompts: dict[bytes, str] = {}

        def of(episode: Episode) -> Response:
            chosen, key = episode.sampled_ids.tolist(), episode.prompt_ids.tobytes()
            if key not in prompts:
                prompts[key] = self.tokenizer.decode(episode.prompt_ids.tolist(), skip_special_tokens=False)
            return Response(chosen, self.tokenizer.decode(chosen, skip_special_tokens=True), prompts[key], episode)

        return [of(episode) for episode in episodes]

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """Score all episodes; returns the groups with the outcome of each reward."""
        every = [(episode, group.row) for group in groups for episode in group.episodes]
        responses = self.responses([episode for episode, _ in every if not episode.failure])
        rows = [row for episode, row in every if not episode.failure]
        outcomes = self.outcomes(responses, rows)
        self._show(responses, rows, outcomes, self.examine)
        each = iter(outcomes)

        def scored(episode: Episode) -> Episode:
            failed = dict.fromkeys(self.rewards, Failed(episode.failure)) if episode.failure else None
            return replace(episode, outcomes=next(each) if failed is None else failed)

        return [replace(group, episodes=tuple(map(scored, group.episodes))) for group in groups]

    def show(self, groups: Sequence[Group], count: int) -> None:
        """Print responses of scored groups, spread over them."""
        episodes = [(episode, group.row) for group in groups for episode in group.episodes] if count else []
        responses = self.responses([episode for episode, _ in episodes])
        self._show(responses, [row for _, row in episodes], [episode.outcomes for episode, _ in episodes], count)

    @staticmethod
    def _show(
        responses: Sequence[Response], rows: Sequence[Mapping[str, Any]], outcomes: Sequence[Mapping[str, Outcome]],
        count: int,
    ) -> None:  # fmt: skip
        for place in np.linspace(0, len(responses) - 1, min(count, len(responses))).round().astype(int):
            print(_shown(responses[place], rows[place], outcomes[place]), flush=True)

    def outcomes(self, responses: Sequence[Response], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Outcome]]:
        """For each response, the outcome of each reward by its name."""
        found: list[dict[str, Outcome]] = [{} for _ in responses]
        pending: list[tuple[str, list[int], Callable[[], Any]]] = []
        coroutines: list[tuple[Reward, list[int], dict[str, Any]]] = []
        for reward in self.rewards.values():
            places = self._scorable(reward, rows, found)
            if isinstance(reward, RewardModel):
                if places:
                    own = [responses[i] for i in places], [rows[i] for i in places]
                    wait = reward.start(*own, self._group, self._prompt_key)
                    pending.append((reward.name, places, wait))
                continue
            for part in [places] if reward.batched and places else [[i] for i in places]:
                arguments = reward.arguments([responses[i] for i in part], [rows[i] for i in part])
                if reward.is_async:
                    coroutines.append((reward, part, arguments))
                elif reward.inline:
                    with self._lock:
                        self._here(reward, part, arguments, found)
                elif reward.batched:
                    batch = self._pool(reward.timeout_s).submit_batch(reward.name, len(part), **arguments)
                    pending.append((reward.name, part, batch.result))
                else:
                    one = self._pool(reward.timeout_s).submit(reward.name, **arguments)
                    pending.append((reward.name, part, one.result))
        if coroutines:
            run_together(coroutines, found)
        for name, places, wait in pending:
            result = wait()
            for place, outcome in zip(places, result if isinstance(result, list) else [result], strict=True):
                found[place][name] = outcome
        return [{name: each[name] for name in self.rewards} for each in found]

    @staticmethod
    def _scorable(
        reward: Reward | RewardModel, rows: Sequence[Mapping[str, Any]], found: list[dict[str, Outcome]]
    ) -> list[int]:
        """The indices of the rows that a reward scores; the outcomes of the others are stored. A row that lacks an
        input of the function does not end the run."""
        places = []
        for i, row in enumerate(rows):
            if not reward.scores(row):
                found[i][reward.name] = Abstain("the reward is for other data")
            elif isinstance(reward, Reward) and (fault := reward.lacks(row)):
                found[i][reward.name] = Failed(fault)
            else:
                places.append(i)
        return places

    def total(self, episode: Episode) -> Outcome:
        """The weighted sum of an episode's rewards."""
        return combine(episode.outcomes, self._weights)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """The metrics of each reward, and of their sum."""
        episodes = Group.episodes_of(groups)
        totals = [self.total(episode) for episode in episodes]
        scores = [outcome.value for outcome in totals if isinstance(outcome, Score)]
        if not self.rewards:
            return {}
        return {
            **metrics_of([episode.outcomes for episode in episodes]),
            "reward_mean": float(np.mean(scores)) if scores else float("nan"),
            "reward_failed": sum(isinstance(outcome, Failed) for outcome in totals) / max(len(totals), 1),
        }

    def close(self) -> None:
        """End the processes. May be called twice."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _pool(self, timeout_s: float) -> ScoringPool:
        with self._lock:
            return self._pools.get(timeout_s) or self._new_pool(timeout_s)

    def _new_pool(self, timeout_s: float) -> ScoringPool:
        functions = {
            reward.name: reward.function
            for reward in self.rewards.values()
            if isinstance(reward, Reward) and not (reward.inline or reward.is_async) and reward.timeout_s == timeout_s
        }
        self._pools[timeout_s] = ScoringPool(
            functions, workers=self._workers, timeout_s=timeout_s, memory_bytes=self._memory_bytes
        )
        return self._pools[timeout_s]

    @staticmethod
    def _here(reward: Reward, places: list[int], arguments: dict[str, Any], found: list[dict[str, Outcome]]) -> None:
        try:
            value = reward.function(**arguments)
        except (Exception, SystemExit) as error:  # a scorer's sys.exit() must not end the run
            logger.warning("reward %r failed on %d responses", reward.name, len(places), exc_info=True)
            value = failure_of(reward, places, error)
        put_outcomes(reward, places, value, found)


def unscored(rewards: Sequence[Reward | RewardModel], data: Prompts) -> Iterator[str]:
    """A fault if no reward scores the rows of some data source: their responses would never be trained on."""
    rows = {str(prompt.row.get("data_source")): prompt.row for prompt in (data[place] for place in range(len(data)))}
    without = sorted(source for source, row in rows.items() if not any(reward.scores(row) for reward in rewards))
    if without:
        sources = sorted({source for reward in rewards for source in reward.sources})
        yield f"data: no reward is for data_source {', '.join(without[:5])}; the rewards are for {', '.join(sources)}"


def lacking(rewards: Sequence[Reward | RewardModel], data: Prompts, name: str) -> Iterator[str]:
    """One sentence per reward function whose inputs some rows lack: their responses would all fail.

    Args:
        name: the name of the data's setting.
    """
    for reward in rewards:
        if not isinstance(reward, Reward):
            continue
        prompts = (data[place] for place in range(len(data)))
        found = [(one.index, fault) for one in prompts if reward.scores(one.row) and (fault := reward.lacks(one.row))]
        if found:
            index, fault = found[0]
            yield f"{name}: {len(found)} of {len(data)} rows cannot be scored; row {index}: {fault}"


def _shown(response: Response, row: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> str:
    lines = [f"[prompt] {response.prompt}", f"[response] {response.text}"]
    if (truth := ground_truth_of(row)) is not None:
        lines.append(f"[ground truth] {truth}")
    return "\n".join([*lines, *(f"[{name}] {outcome}" for name, outcome in outcomes.items())])
