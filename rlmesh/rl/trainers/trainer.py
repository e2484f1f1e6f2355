"""The training loop. It fits one screen and is meant to be copied: see `Trainer.fit`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlmesh import RoleGroup, WeightSync, current_worker
from rlmesh.errors import CallError, SourceRestarted, WeightsNotReady, WeightSyncError
from rlmesh.rl.algorithms.protocol import Evaluated, TokenWeights
from rlmesh.rl.components import Columns, padded
from rlmesh.rl.data.loader import Drawn, PromptLoader
from rlmesh.rl.drift import DriftAlarm, drift
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.training.packed import EMPTY
from rlmesh.rl.packing import Packs
from rlmesh.rl.packing import pack as build_packs
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.roles.actor import Share
from rlmesh.rl.rollout.buffer import SampleBuffer
from rlmesh.rl.types import Episode, Group, Score

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run, RunResult

__all__ = ["Trainer", "result_of"]

PUSHES = 5
RESTART_NEWS_S = 2.0
"""The time for which a failed call waits for the news that a restart was its reason, in seconds."""
SUMMARY, MODEL = "summary.json", "model"


class Trainer:
    """Drives the other roles through a training. Override a stage of `fit` to change it."""

    def setup(self) -> None:
        self.settings: Run = current_worker().job_info.user_config
        self.run_dir = Path(current_worker().run_dir)
        self.tokenizer = self.settings.tokenizer()
        self.algorithm = self.settings.algorithm
        self.actor, self.engines = RoleGroup("ACTOR"), RoleGroup("ROLLOUT").options(idempotent=True)
        self.rewards = Rewards(
            self.settings.scored, self.tokenizer, workers=self.settings.reward_workers, examine=self.settings.examine
        )
        data = self.settings.dataset(self.tokenizer)
        print(f"data: {data.counts}", flush=True)
        loader = PromptLoader(data, self.settings.batch_size, seed=self.settings.seed)
        self.buffer = SampleBuffer(loader, self.sample)
        self.alarm = DriftAlarm(self.settings.actor.precision)
        self.version, self.last = 0, dict[str, float]()

    def teardown(self) -> None:
        self.rewards.close()

    def run(self) -> None:
        self.fit()
        self.weight_sync.close()
        self.export()

    def fit(self) -> None:
        """All steps that remain. When the actor restarts, it goes back to its latest checkpoint, and so does this."""
        ready = False
        while not ready or self.version < self.settings.steps:
            try:
                if ready:
                    self.step(self.version + 1)
                else:
                    self.begin()
                    ready = True
            except (CallError, WeightSyncError) as error:
                if not isinstance(error, SourceRestarted) and not _actor_restarted():
                    raise
                ready = False

    def step(self, step: int) -> None:
        """One step: sample, score, evaluate, train, publish, report."""
        began = time.perf_counter()
        groups = self.rewards.score(self.buffer.take(step))
        packs, batch = self.evaluate(self.usable(groups))
        metrics = self.rewards.metrics(groups) | lengths_of(groups)
        metrics |= self.train(packs, batch, self.algorithm.weigh(batch))
        self.version = step
        self.publish()
        self.buffer.free(step)
        self.finish(step, metrics | {"step_time_s": time.perf_counter() - began})

    # Stages of a step.

    def sample(self, drawn: Sequence[Drawn], step: int) -> list[Group]:
        """One group of responses per prompt, with the weights of the last push."""
        samples = self.algorithm.samples
        prompts = [one.prompt.ids.tolist() for one in drawn for _ in range(samples)]
        episodes = self.generate(prompts, self.settings.rollout.temperature, seed=self.settings.seed * 100_003 + step)
        if late := {episode.policy_version for episode in episodes} - {self.version, None}:
            raise RuntimeError(f"step {step}: sampled by versions {sorted(map(str, late))}, not by {self.version}")
        return [
            Group(one.key, tuple(episodes[place * samples : (place + 1) * samples]), one.prompt.row)
            for place, one in enumerate(drawn)
        ]

    def generate(self, prompts: Sequence[list[int]], temperature: float, seed: int = 0) -> list[Episode]:
        """One episode per prompt. The prompts are spread over the engines."""
        rollout = self.settings.rollout
        params = SamplingParams(rollout.max_tokens, temperature=temperature, seed=seed)
        for _ in range(PUSHES):
            try:
                return [Episode.of(each) for each in self.engines.call_batch("generate", len(prompts), prompts, params)]
            except WeightsNotReady:
                self.weight_sync.catch_up()  # an engine restarted since the push
        raise RuntimeError(f"an engine has no weights after {PUSHES} pushes")

    def usable(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with at least one response that has a reward.

        Raises:
            RuntimeError: no response of the batch has one.
        """
        kept = [group for group in groups if any(isinstance(self.rewards.total(e), Score) for e in group.episodes)]
        if not kept:
            episodes = Group.episodes_of(groups)
            raise RuntimeError(
                f"no response of the batch has a reward: {episodes[0].outcomes} was said of the first of "
                f"{len(episodes)}. Check the rewards and the columns of the data that they read"
            )
        return kept

    def evaluate(self, groups: Sequence[Group]) -> tuple[Packs, Evaluated]:
        """The groups as packs, one row of them for each rank of the actor, with all that the roles say of them."""
        episodes = Group.episodes_of(groups)
        numbers = [number for number, group in enumerate(groups) for _ in group.episodes]
        budget, ranks = self.settings.actor.token_budget, len(self.actor)
        packs = build_packs(episodes, groups=numbers, token_budget=budget, ranks=ranks)
        mask = padded([episode.mask for episode in episodes], fill=False)
        totals = [self.rewards.total(episode) for episode in episodes]
        by_actor = self.actor.call("log_probs", [list(own) for own in packs.by_rank], _scatter=True)
        by_reference = None
        if "reference" in self.algorithm.needs:
            flat = [one for own in packs.by_rank for one in own]
            by_reference = RoleGroup("REFERENCE").options(idempotent=True)[0].call("log_probs", flat)
        rows = by_actor.result()
        return packs, Evaluated(
            mask=mask,
            groups=torch.tensor(numbers),
            rewards=torch.tensor([one.value if isinstance(one, Score) else 0.0 for one in totals]).double(),
            valid=torch.tensor([isinstance(one, Score) for one in totals]),
            log_probs=_matrix(mask, packs, [one for own in rows for one in own]),
            sampled_log_probs=padded([episode.sampled_log_probs for episode in episodes]).double(),
            ref_log_probs=None if by_reference is None else _matrix(mask, packs, by_reference.result()),
            cut_off=torch.tensor([episode.finish_reason == "length" for episode in episodes]),
        )

    def train(self, packs: Packs, batch: Evaluated, weights: TokenWeights) -> dict[str, float]:
        """One optimizer step per epoch; gives what the actor reports, and how far engine and actor are apart."""
        gap = drift(batch.log_probs, batch.sampled_log_probs, batch.mask)
        alarms = self.alarm.check(gap, version=self.version)
        shares = [
            Share(
                tuple(own),
                tuple(Columns.of(one, batch, weights, "cpu", torch.float32) for one in own),
                Columns.of(EMPTY, batch, weights, "cpu", torch.float32),
                weights.normalisers,
            )
            for own in packs.by_rank
        ]
        report = self.actor.call("update", shares, _scatter=True).result()[0]
        return {
            **report,
            **weights.metrics,
            **alarms,
            "prompt_tokens_saved": packs.saved_share,
        }

    def publish(self) -> None:
        """Push the actor's weights to the engines, under the current version."""
        for _ in range(PUSHES):
            try:
                self.weight_sync.push(self.version).result()
                return
            except WeightSyncError as error:
                if error.receiver is None:
                    raise
                # An engine was lost during the push. The next push waits for its return.
        raise RuntimeError(f"version {self.version} could not be pushed in {PUSHES} attempts")

    def finish(self, step: int, metrics: dict[str, float]) -> None:
        """Validate, save and report."""
        settings, is_last = self.settings, step == self.settings.steps
        if is_last or (settings.validate_every and step % settings.validate_every == 0):
            metrics |= self.validate()
        if is_last or step % settings.save_every == 0:
            self.actor.call("save").result()
        self.last = {name: value for name, value in metrics.items() if np.isfinite(value)}
        current_worker().report(step=step, total_steps=settings.steps, **self.last)

    def validate(self) -> dict[str, float]:
        """Mean rewards of greedy responses to the validation prompts; empty without any."""
        if self.settings.validation is None:
            return {}
        prompts = list(self._validation)
        episodes = self.generate([prompt.ids.tolist() for prompt in prompts], temperature=0.0)
        groups = [
            Group((0, prompt.index), (episode,), prompt.row) for prompt, episode in zip(prompts, episodes, strict=True)
        ]
        found = self.rewards.metrics(self.rewards.score(groups))
        return {f"val/{name}": value for name, value in found.items()}

    def export(self) -> None:
        """Leave the trained policy as a folder, and the last metrics as JSON."""
        folder = self.run_dir / MODEL
        self.actor.call("export", str(folder)).result()
        self.tokenizer.save_pretrained(folder)
        aside = self.run_dir / f".{SUMMARY}.{os.getpid()}"
        aside.write_text(json.dumps({"steps": self.version, "metrics": self.last}) + "\n")
        aside.replace(self.run_dir / SUMMARY)

    # Restarts.

    def begin(self) -> None:
        """Take up the actor's version, publish it, and validate before the first step."""
        before = self.version
        self.version = self.actor.call("restore").result()[0]
        if self.version < before:
            print(f"back to step {self.version}: {before - self.version} steps were lost to a restart", flush=True)
        self.publish()
        if self.version == 0:
            self.last = self.validate()
            current_worker().report(step=0, total_steps=self.settings.steps, **self.last)

    @cached_property
    def weight_sync(self) -> WeightSync:
        """From the actor's ranks to the engines."""
        return WeightSync(RoleGroup("ACTOR"), RoleGroup("ROLLOUT"))

    @cached_property
    def _validation(self) -> Any:
        return self.settings.dataset(self.tokenizer, self.settings.validation)


def _actor_restarted() -> bool:
    """True if a failed call was due to a restart of the actor. The news of it may come after the error."""
    deadline = time.monotonic() + RESTART_NEWS_S
    while (left_s := deadline - time.monotonic()) > 0:
        if any(event.role == "ACTOR" for event in current_worker().events(left_s)):
            return True
    return False


def lengths_of(groups: Sequence[Group]) -> dict[str, float]:
    """The mean length of responses, and the share that a limit cut off."""
    episodes = Group.episodes_of(groups)
    return {
        "response_tokens": float(np.mean([episode.response_tokens for episode in episodes])),
        "cut_off_share": float(np.mean([episode.finish_reason == "length" for episode in episodes])),
    }


def result_of(run_dir: Path) -> RunResult:
    """The end of a run, from its run directory."""
    from rlmesh.rl.trainers.run import RunResult

    summary = json.loads((run_dir / SUMMARY).read_text())
    return RunResult(run_dir, run_dir / MODEL, summary["metrics"])


def _matrix(mask: torch.Tensor, packs: Packs, rows: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    """Numbers of the targets of packs as ``[episodes, time]``, float64, 0 elsewhere."""
    found = torch.zeros(mask.shape, dtype=torch.float64)
    flat = [one for own in packs.by_rank for one in own]
    for one, numbers in zip(flat, rows, strict=True):
        found[torch.from_numpy(one.rows), torch.from_numpy(one.places)] = torch.from_numpy(numbers).double()
    return found
