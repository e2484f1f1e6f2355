"""The side of rlmesh end to end: a job of a trainer, one actor and one rollout engine, which takes turns with TRL."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from post_training_reward import even
from post_training_rlmesh import time_phases
from post_training_samples import Shape, build_model, build_tokenizer, record, special_ids
from post_training_step import Gate, about

from rlmesh import RLJobBuilder, rpc
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.testing import LocalCluster

__all__ = ["set_ends", "whole_job"]


@dataclass(frozen=True)
class MeasuredRun(Run):
    """A run whose steps wait for a gate.

    Attributes:
        gate: its folder.
    """

    gate: str = ""

    def tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self.model)  # words, unlike those of the model's family


class MeasuredTrainer(Trainer):
    """Makes a step whenever the gate opens, and writes what its phases took."""

    settings: MeasuredRun

    def run(self) -> None:
        settings: Any = self.settings
        gate = Gate(Path(settings.gate))
        self.begin()
        for step in range(1, settings.steps):  # the last one would save and export
            if not gate.wait(step - 1):
                break
            gate.done(step - 1, self.measured(step))
        self.weight_sync.close()

    def measured(self, step: int) -> dict[str, Any]:
        phases: dict[str, float] = {}

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                began = time.perf_counter()
                result = function(*args)
                phases[name] = time.perf_counter() - began
                return result

            return call

        own: Any = self
        for name, method in (("push", Trainer.publish), ("scoring", Trainer.score)):
            setattr(own, method.__name__, timed(name, method.__get__(self)))
        for role in (self.actor, self.engines):
            role.call("take_spent").result()
        began = time.perf_counter()
        self.step(step)
        spent = time.perf_counter() - began
        for role in (self.actor, self.engines):
            phases |= role.call("take_spent").result()[0]
        rows = self.settings.batch_size * self.algorithm.samples
        return about("cpu", "float32") | {
            "step_s": spent, "phases": phases, "generate_s": phases["sampling"], "samples_per_s": rows / spent,
            "response_tokens": self.last["response_tokens"] * rows,
        }  # fmt: skip


class MeasuredActor(ActorRole):
    """The actor, which measures its phases."""

    def setup(self) -> None:
        super().setup()
        self._spent = time_phases(self, lambda: None)

    @rpc
    def take_spent(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        found = dict(self._spent)
        self._spent.clear()
        return found


class MeasuredRollout(RolloutRole):
    """The engine, which measures its sampling."""

    @rpc
    def take_spent(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        total = self.engine.metrics()["generating_s"]
        before, self._before = getattr(self, "_before", 0.0), total
        return {"sampling": total - before}


def set_ends(model: Any, shape: Shape) -> None:
    """Let a share of the vocabulary end a response, so that responses of random weights have a third of the longest
    length on average."""
    _, end = special_ids(shape)
    ends = sorted({end, *range(0, shape.vocabulary - 3, max(shape.response_tokens // 3, 8))})
    model.config.eos_token_id = ends
    model.generation_config.eos_token_id = ends


def whole_job(job: dict[str, Any], gate: Gate) -> None:
    """Carry out the steps of a side."""
    shape = Shape(**job["shape"])
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        folder = Path(directory) / "model"
        model = build_model(shape)
        set_ends(model, shape)
        model.save_pretrained(folder)
        build_tokenizer(shape).save_pretrained(folder)
        rows = [
            {"prompt": " ".join(f"w{i}" for i in prompt)}
            for batch in record(shape, job["steps"])
            for prompt in batch.prompts
        ]
        run = MeasuredRun(
            model=str(folder), data=rows, rewards=[even], algorithm=GRPO(samples=shape.samples, clip_high=0.2),
            steps=job["steps"] + 1, batch_size=shape.prompts, save_every=10**6, gate=job["folder"],
            actor=ActorSettings(lr=1e-6, threads=job["threads"], token_budget=job["token_budget"]),
            rollout=RolloutSettings(max_tokens=shape.response_tokens, threads=job["threads"]),
        )  # fmt: skip
        builder = RLJobBuilder().config(run).node_num(1).device_type("CPU").device_per_node(8)
        builder.trainer(MeasuredTrainer).resource(cpu=0)
        builder.actor(MeasuredActor).resource(cpu=0)
        builder.rollout(MeasuredRollout).resource(cpu=0)
        with LocalCluster(run_root=Path(directory)):
            builder.build().submit("post-training")
