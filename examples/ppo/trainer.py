"""The training loop. It fits one screen and is meant to be copied."""

from __future__ import annotations

import time
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from rlmesh import current_worker

from . import data, remote_call
from .common import Sample, SamplingParams
from .config import PPOConfig
from .data import Row
from .experience_maker import make_experience, require_version
from .model import encode


class PPOTrainer:
    """Drives the other roles through PPO; ``history`` keeps the metrics, from step 0, before training, on."""

    def __init__(
        self, config: PPOConfig, tokenizer: PreTrainedTokenizerFast, train: list[Row], validation: list[Row]
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.train = train
        self.validation = validation
        self.version = 0
        self.history: list[dict[str, float]] = []

    def fit(self, checkpoints: Path) -> None:
        config = self.config
        batches = data.batches(self.train, config.batch_size, config.seed)
        self.history.append({"heldout_accuracy": self.validate()})
        # Also closes the account of the calls made so far: they are part of no step.
        current_worker().report(step=0, total_steps=config.steps, **self.history[0])
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            rows = next(batches)
            samples = self.generate(rows, config.temperature, seed=config.seed * 100_003 + step)
            made = make_experience(samples, [r.answer for r in rows], config, self.tokenizer.pad_token_id)
            remote_call.append_experience(made.experience)

            critic_update = remote_call.critic_update()
            actor_update = remote_call.actor_update()
            critic, actor = critic_update.result()[0], actor_update.result()[0]
            self.version += 1
            remote_call.broadcast_to_rollout(self.version)
            step_time_s = time.perf_counter() - started

            metrics = {**made.metrics, "step_time_s": step_time_s, "value_loss": critic["value_loss"], **actor}
            if step % config.eval_every == 0 or step == config.steps:
                metrics["heldout_accuracy"] = self.validate()
            if step % config.save_every == 0 or step == config.steps:
                remote_call.save_checkpoint(str(checkpoints / f"step-{step:06d}"), step)
            self.history.append(metrics)
            current_worker().report(step=step, **metrics)
        remote_call.end_job(with_reference=config.init_kl_coef != 0)

    def generate(self, rows: list[Row], temperature: float, seed: int = 0) -> list[Sample]:
        prompts = encode(self.tokenizer, [row.prompt for row in rows])
        params = SamplingParams(self.config.max_new_tokens, temperature, seed)
        samples = list(remote_call.rollout_generate(prompts, params))
        require_version(samples, self.version)
        return samples

    def validate(self) -> float:
        """Share of held-out prompts that the policy answers right when it takes its likeliest token each time."""
        samples = self.generate(self.validation, temperature=0)
        scores = remote_call.reward_forward([s.token_ids for s in samples], [r.answer for r in self.validation])
        return sum(scores) / len(scores)
