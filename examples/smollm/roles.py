"""The three roles: an actor that trains, a vLLM engine that samples, and the trainer that controls both."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from rlmesh import ReceivesWeights, RoleGroup, SendsWeights, WeightSync, current_worker, rpc
from rlmesh.errors import CallError, WeightSyncError
from rlmesh.rl import DDPEngine, Sample, SamplingParams, TrainingOptions
from rlmesh.rl.drift import DriftAlarm, drift
from rlmesh.rl.engines.training.forward import response_log_probs
from rlmesh.rl.group_advantages import grpo
from rlmesh.rl.losses import aggregate, ppo_clip_loss, valid_count

from .config import GRPOConfig
from .model import load
from .tasks import Tasks


def job_config() -> GRPOConfig:
    return GRPOConfig(**current_worker().job_info.user_config)


def model_folder() -> Path:
    return Path(current_worker().run_dir) / "model"


def checkpoint() -> Path:
    return Path(current_worker().run_dir) / "checkpoint"


@dataclass(frozen=True)
class Batch:
    """Samples as tensors: prompts padded on the left, responses on the right. Shapes: ``sequences`` and
    ``attention_mask`` ``[batch, time]``; the others ``[batch, response]``."""

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    sampled_log_probs: Tensor
    advantages: Tensor

    def __len__(self) -> int:
        return self.sequences.shape[0]

    def split(self, parts: int) -> list[Batch]:
        columns = [getattr(self, field.name).tensor_split(parts) for field in fields(self)]
        return [Batch(*part) for part in zip(*columns, strict=True)]

    @classmethod
    def of(cls, samples: Sequence[Sample], advantages: Tensor, pad: int) -> Batch:
        before = max(len(s.prompt_token_ids) for s in samples)
        after = max(len(s.token_ids) for s in samples)
        rows, attend, act, logs = [], [], [], []
        for s in samples:
            left, right = before - len(s.prompt_token_ids), after - len(s.token_ids)
            rows.append([pad] * left + s.prompt_token_ids + s.token_ids + [pad] * right)
            attend.append([False] * left + [True] * (before - left + len(s.token_ids)) + [False] * right)
            act.append([True] * len(s.token_ids) + [False] * right)
            logs.append(s.log_probs + [0.0] * right)
        mask = torch.tensor(act)
        spread = advantages.unsqueeze(1).expand(mask.shape).contiguous()
        return cls(torch.tensor(rows), torch.tensor(attend), mask, torch.tensor(logs), spread)


class Actor(SendsWeights):
    def setup(self) -> None:
        torch.set_num_threads(2)
        self.config = job_config()
        self.alarm = DriftAlarm("float32")

    @rpc
    def init(self) -> int:
        """Load the model, save it to a folder for the engine, and load the last checkpoint if there is one; returns its
        step."""
        model, tokenizer = load()
        model.save_pretrained(model_folder())
        tokenizer.save_pretrained(model_folder())
        options = TrainingOptions(lr=self.config.lr, micro_batch_size=self.config.micro_batch_size)
        self.engine = DDPEngine(model.eval(), options)
        if (checkpoint() / "current.json").exists():
            self.engine.load(checkpoint())
        # Report the restored step: a push refuses a restarted actor that lost steps without reporting it.
        self.send_weights(self.engine.named_tensors(), restored=self.engine.steps)
        return self.engine.steps

    @rpc
    def save(self) -> None:
        self.engine.save(checkpoint()).result()

    @rpc
    def update(self, batch: Batch, version: int) -> dict[str, float]:
        """One step on samples of ``version``."""
        count = valid_count(batch.action_mask, "token-mean")
        old = self.engine.log_probs(
            batch.sequences, batch.attention_mask, batch.action_mask, temperature=self.config.temperature
        )
        gap = self.alarm.check(drift(old, batch.sampled_log_probs, batch.action_mask), version=version)

        def loss(model: nn.Module, part: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            log_probs = response_log_probs(
                model, part.sequences, part.attention_mask, part.action_mask, temperature=self.config.temperature
            )
            terms = ppo_clip_loss(
                log_probs, part.sampled_log_probs, part.advantages, part.action_mask, clip_low=self.config.clip
            )
            return aggregate(terms.loss, part.action_mask, "token-mean", denominator=count), {}

        report = self.engine.train_step(batch, loss)
        return {**gap, "grad_norm": report.grad_norm, "loss": report.loss}


class Rollout(ReceivesWeights):
    def setup(self) -> None:
        torch.set_num_threads(2)

    @rpc
    def init(self) -> None:
        if hasattr(self, "engine"):
            return  # the actor went back to a checkpoint; this engine stays and gets its weights by a push
        from rlmesh.rl import VllmEngine

        self.engine = VllmEngine(str(model_folder()), dtype="float32", max_model_len=256, max_num_seqs=64)
        self.receive_weights(self.engine.sink)

    @rpc
    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Sample]:
        return self.engine.generate(prompts, params)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.close_weights()
            self.engine.close()


class Trainer:
    """The loop."""

    def run(self) -> None:
        self.config = config = job_config()
        self.actor = RoleGroup(Actor)
        self.rollout = RoleGroup(Rollout)
        train = Tasks(config.task, config.steps * config.prompts, config.seed)
        heldout = Tasks(config.task, config.heldout, config.seed + 1_000_000)
        found: dict[str, Any] = {"reward": [], "seconds": []}
        step: int | None = None
        with WeightSync(self.actor, self.rollout) as sync:
            while step is None or step < config.steps:
                began = time.perf_counter()
                try:
                    if step is None:
                        step = self.begin(sync)
                        del found["reward"][step:], found["seconds"][step:]
                        if "heldout_first" not in found:
                            found["heldout_first"] = self.accuracy(heldout)
                        continue
                    metrics = self.step(train, step + 1)
                    sync.push(step + 1).result()
                    if (step + 1) % config.save_every == 0:
                        self.actor.call(Actor.save).result()
                except (CallError, WeightSyncError) as error:
                    if not current_worker().events(wait_s=2.0):
                        raise  # no member has restarted: the error is in this program
                    print(f"goes back to the last checkpoint: {error}", flush=True)
                    step = None
                    continue
                step += 1
                found["reward"].append(metrics["reward_mean"])
                found["seconds"].append(time.perf_counter() - began)
                current_worker().report(step=step, total_steps=config.steps, **metrics)
            found["heldout_last"] = self.accuracy(heldout)
        (Path(current_worker().run_dir) / "summary.json").write_text(json.dumps(found))
        rewards = [round(reward, 2) for reward in found["reward"]]
        print(f"held-out accuracy {found['heldout_first']:.3f} → {found['heldout_last']:.3f}, rewards {rewards}")
        print(f"{mean(found['seconds']):.1f} s per step", flush=True)

    def begin(self, sync: WeightSync) -> int:
        """Set up both roles, also after a restart; returns the step of their weights."""
        step = self.actor.call(Actor.init).result()[0]
        self.rollout.call(Rollout.init).result()
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_folder())
        sync.push(step).result()
        return step

    def step(self, tasks: Tasks, step: int) -> dict[str, float]:
        config = self.config
        numbers = [n for n in range((step - 1) * config.prompts, step * config.prompts) for _ in range(config.samples)]
        params = SamplingParams(config.max_new_tokens, temperature=config.temperature, seed=config.seed + step)
        samples = self.generate(tasks, numbers, params)
        rewards = self.scores(tasks, numbers, samples)
        advantages = grpo(torch.tensor(rewards), torch.tensor(numbers))
        batch = Batch.of(samples, advantages, self.tokenizer.pad_token_id or 0)
        report = self.actor.call(Actor.update, batch, step - 1).result()[0]
        return {"reward_mean": mean(rewards), **report}

    def accuracy(self, tasks: Tasks) -> float:
        """The accuracy of greedy answers to held-out tasks."""
        numbers = list(range(self.config.heldout))
        samples = self.generate(tasks, numbers, SamplingParams(self.config.max_new_tokens, temperature=0))
        return mean(self.scores(tasks, numbers, samples))

    def generate(self, tasks: Tasks, numbers: Sequence[int], params: SamplingParams) -> list[Sample]:
        prompts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": tasks.question(number)}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for number in numbers
        ]
        return self.rollout.call(Rollout.generate, prompts, params).result()[0]

    def scores(self, tasks: Tasks, numbers: Sequence[int], samples: Sequence[Sample]) -> list[float]:
        texts = [self.tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples]
        return [tasks.score(number, text) for number, text in zip(numbers, texts, strict=True)]
