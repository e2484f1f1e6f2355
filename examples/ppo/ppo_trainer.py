"""The trainer role: prepares data and model, sets up the other roles, and runs the loop of ``trainer.py``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import torch
from transformers import PreTrainedTokenizerFast

from rlmesh import current_worker

from . import data, remote_call
from .checkpoints import Checkpoints
from .common import job_config, pretrained, write_atomically
from .config import PPOConfig
from .model import make_pretrained
from .trainer import PPOTrainer

ENDS = 5
"""Number of steps over which the first and last rewards are averaged."""


class PPOTrainerActor:
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.config = job_config()

    def run(self) -> None:
        run_dir = Path(current_worker().run_dir)
        train, validation = self.prepare_dataset(run_dir)
        if not pretrained().exists():
            reached = make_pretrained(pretrained(), train, seed=self.config.seed, accuracy=self.config.warmup_accuracy)
            print(f"warm-up: sampled answers are right in {reached:.0%}; from here on it is PPO", flush=True)

        tokenizer = PreTrainedTokenizerFast.from_pretrained(pretrained())
        trainer = PPOTrainer(self.config, tokenizer, train, validation)
        trainer.fit(lambda: self.init_workers(str(pretrained())), Checkpoints(run_dir / "checkpoints"))

        summary = summarize(self.config, trainer.history, trainer.lost)
        write_atomically(run_dir / "summary.json", lambda f: f.write(json.dumps(summary).encode() + b"\n"))
        print(f"sampled reward     {summary['reward_first']:.3f} → {summary['reward_last']:.3f}")
        print(f"held-out accuracy  {summary['heldout_first']:.3f} → {summary['heldout_last']:.3f}")
        print("summary " + json.dumps(summary), flush=True)

    def prepare_dataset(self, run_dir: Path) -> tuple[list[data.Row], list[data.Row]]:
        directory = Path(self.config.data_dir) if self.config.data_dir else run_dir / "data"
        if not (directory / "train.parquet").exists():
            data.write(directory, self.config.seed)
        return data.read(directory / "train.parquet"), data.read(directory / "validation.parquet")

    def init_workers(self, model_path: str) -> None:
        futures = [
            remote_call.reward_init(model_path),
            remote_call.critic_init(model_path),
            remote_call.actor_init(model_path),
            remote_call.rollout_init(model_path),
        ]
        if self.config.init_kl_coef != 0:
            futures.append(remote_call.reference_init(model_path))
        for future in futures:
            future.result()


def summarize(config: PPOConfig, history: list[dict[str, float]], lost: int = 0) -> dict[str, float]:
    """First and last values of the reward of sampled answers and of the greedy accuracy on held-out prompts, and the
    number of steps that restarts have undone."""
    steps = [step for step in history if "reward_mean" in step]
    rewards = [step["reward_mean"] for step in steps]
    heldout = [step["heldout_accuracy"] for step in history if "heldout_accuracy" in step]
    return {
        "seed": config.seed,
        "steps": len(steps),
        "steps_lost": lost,
        "reward_first": mean(rewards[:ENDS]),
        "reward_last": mean(rewards[-ENDS:]),
        "heldout_first": heldout[0],
        "heldout_last": heldout[-1],
        "step_time_s": mean(step["step_time_s"] for step in steps),
    }
