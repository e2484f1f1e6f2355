"""The training loop. It fits one screen and is meant to be copied."""

from __future__ import annotations

import time
from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

from rlmesh import current_worker
from rlmesh.errors import CallError, SourceRestarted, WeightsNotReady, WeightSyncError
from rlmesh.rl import Sample, SamplingParams

from . import data, remote_call
from .checkpoints import Checkpoints
from .config import PPOConfig
from .data import Row
from .experience_maker import make_experience, require_version
from .model import encode

PUSHES = 5
NEWS_S = 2.0
"""Seconds to wait, after a failed call, for the event of a restart that caused it."""


def learners_restarted() -> bool:
    """True if a failed call was caused by a restart of actor or critic: both must go back to the latest checkpoint.

    Other roles recover by themselves, and their calls are repeated; their events may come first.
    """
    deadline = time.monotonic() + NEWS_S
    while (left_s := deadline - time.monotonic()) > 0:
        if {event.role for event in current_worker().events(left_s)} & {"ACTOR", "CRITIC"}:
            return True
    return False


class PPOTrainer:
    """Controls the other roles.

    Attributes:
        history: metrics of each step, from step 0 (before training) on.
        lost: number of steps that restarts have undone.
    """

    def __init__(
        self, config: PPOConfig, tokenizer: PreTrainedTokenizerFast, train: list[Row], validation: list[Row]
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.train = train
        self.validation = validation
        self.version = 0
        self.history: list[dict[str, float]] = []
        self.lost = 0

    def fit(self, init_workers: Callable[[], None], checkpoints: Checkpoints) -> None:
        ready = False
        while not ready or self.version < self.config.steps:
            try:
                if ready:
                    self.step(checkpoints)
                else:
                    init_workers()
                    self.begin(checkpoints)
                    ready = True
            except (CallError, WeightSyncError) as error:
                if not isinstance(error, SourceRestarted) and not learners_restarted():
                    raise
                ready = False
        remote_call.weight_sync().close()
        remote_call.end_job(with_reference=self.config.init_kl_coef != 0)

    def begin(self, checkpoints: Checkpoints) -> None:
        """Start from the latest checkpoint, or from step 0."""
        found = checkpoints.restore()
        if found.lost > self.lost:
            print(f"back to step {found.step}: {found.lost - self.lost} steps were lost to a restart", flush=True)
        self.version, self.history, self.lost = found.step, found.history, found.lost
        self.publish()
        if not self.history:
            self.history.append({"heldout_accuracy": self.validate()})
            checkpoints.save(0, self.history)
            # The report also ends the count of calls so far, which belong to no step.
            current_worker().report(step=0, total_steps=self.config.steps, **self.history[0])

    def step(self, checkpoints: Checkpoints) -> None:
        config, step, started = self.config, self.version + 1, time.perf_counter()
        rows = data.batch(self.train, config.batch_size, config.seed, self.version)
        samples = self.generate(rows, config.temperature, seed=config.seed * 100_003 + step)
        made = make_experience(samples, [r.answer for r in rows], config, self.tokenizer.pad_token_id)
        remote_call.append_experience(made.experience)

        critic_update = remote_call.critic_update()
        actor_update = remote_call.actor_update()
        critic, actor = critic_update.result()[0], actor_update.result()[0]
        self.version = step
        self.publish()
        step_time_s = time.perf_counter() - started

        metrics = {**made.metrics, "step_time_s": step_time_s, "value_loss": critic["value_loss"], **actor}
        if step % config.eval_every == 0 or step == config.steps:
            metrics["heldout_accuracy"] = self.validate()
        self.history.append(metrics)
        if step % config.save_every == 0 or step == config.steps:
            checkpoints.save(step, self.history)
        checkpoints.reached(step, self.lost)
        current_worker().report(step=step, steps_lost=self.lost, **metrics)

    def publish(self) -> None:
        """Push the actor's weights to the engines, as the current version."""
        for _ in range(PUSHES):
            try:
                remote_call.weight_sync().push(self.version).result()
                return
            except WeightSyncError as error:
                if error.receiver is None:
                    raise
                # An engine was lost. The others serve the old weights; the next push waits until it has restarted.
        raise RuntimeError(f"version {self.version} could not be pushed in {PUSHES} attempts")

    def generate(self, rows: list[Row], temperature: float, seed: int = 0) -> list[Sample]:
        prompts = encode(self.tokenizer, [row.prompt for row in rows])
        params = SamplingParams(self.config.max_new_tokens, temperature=temperature, seed=seed)
        try:
            samples = list(remote_call.rollout_generate(prompts, params))
        except WeightsNotReady:
            # An engine restarted since the push, and refuses to sample without weights.
            remote_call.weight_sync().catch_up()
            samples = list(remote_call.rollout_generate(prompts, params))
        require_version(samples, self.version)
        return samples

    def validate(self) -> float:
        """The share of held-out prompts that greedy sampling answers right."""
        samples = self.generate(self.validation, temperature=0)
        scores = remote_call.reward_forward([s.token_ids for s in samples], [r.answer for r in self.validation])
        return sum(scores) / len(scores)
