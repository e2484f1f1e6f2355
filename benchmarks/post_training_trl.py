"""The side of TRL: its GRPO trainer on recorded samples, or sampling by itself."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import huggingface_hub.constants
import torch
from post_training_samples import Ids, RecordedBatch, Shape, build_tokenizer

__all__ = ["Settings", "StepSeen", "TrlRun"]

huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # TRL reports its runs, in a thread that stays


@dataclass(frozen=True)
class Settings:
    """What both sides share.

    Attributes:
        loss: ``grpo``, ``dapo``, ``dr_grpo``, ``gspo``, ``cispo`` or ``sapo``.
        clip_low, clip_high: of the ratio; of CISPO, ``clip_high`` is the most of a ratio less 1.
        kl: weight of the divergence from the reference.
        lr: of AdamW, constant.
        eps: of AdamW.
        epochs: optimizer steps on each batch.
        weight_decay: of AdamW.
        max_grad_norm: 0: never clip.
        activation_checkpointing: in the layers.
    """

    loss: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    lr: float = 1e-3
    eps: float = 1e-8
    epochs: int = 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class StepSeen:
    """One optimizer step: its loss, the gradient's norm before clipping."""

    loss: float
    grad_norm: float


class TrlRun:
    """A training of TRL.

    Args:
        model: trained in place.
        batches: one per sampling; an optimizer step is made on each ``epochs`` times.
        own_sampling: sample by TRL's transformers engine instead, to prompts of the batches.
        reward: scores responses that were sampled; recorded samples have recorded rewards.
        options: further fields of its configuration.
    """

    def __init__(
        self,
        model: Any,
        shape: Shape,
        batches: Sequence[RecordedBatch],
        settings: Settings,
        *,
        own_sampling: bool = False,
        reward: Callable[[Ids], float] | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        import os

        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        warnings.filterwarnings("ignore")
        from datasets import Dataset
        from transformers.trainer_callback import PrinterCallback, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        self.batches, self.reward = batches, reward
        self.seen: list[StepSeen] = []
        self.on_step: Callable[[int], None] = lambda step: None
        tokenizer = build_tokenizer(shape)
        rows = [
            {"prompt": " ".join(f"w{i}" for i in prompt), "place": [step, number]}
            for step, batch in enumerate(batches)
            for number, prompt in enumerate(batch.prompts)
        ]
        sequence_level = settings.loss == "gspo"
        folder = tempfile.mkdtemp(prefix="trl-")
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=shape.micro_batch,
            gradient_accumulation_steps=shape.rows // shape.micro_batch,
            num_generations=shape.samples,
            num_iterations=settings.epochs,
            max_completion_length=shape.response_tokens,
            max_steps=len(batches) * settings.epochs,
            learning_rate=settings.lr,
            lr_scheduler_type="constant",
            adam_epsilon=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            loss_type="grpo" if sequence_level else settings.loss,
            importance_sampling_level="sequence" if sequence_level else "token",
            epsilon=settings.clip_low,
            epsilon_high=settings.clip_high + (1 if settings.loss == "cispo" else 0),
            beta=settings.kl,
            use_bias_correction_kl=bool(settings.kl),
            shuffle_dataset=False,
            temperature=1.0,
            bf16=False,
            use_cpu=device == "cpu",
            gradient_checkpointing=settings.activation_checkpointing,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            remove_unused_columns=False,
            **options,
        )

        def score(completion_ids: list[Ids], place: list[list[int]], **_: Any) -> list[float]:
            if self.reward is not None:
                return [self.reward(ids) for ids in completion_ids]
            taken: dict[tuple[int, ...], int] = {}
            found = []
            for step, number in map(tuple, place):
                count = taken[step, number] = taken.get((step, number), -1) + 1
                found.append(self.batches[step].rewards[number][count])
            return found

        self.sampled = 0

        def recorded(prompts: list[str], _: Any) -> dict[str, Any]:
            batch = self.batches[self.sampled]
            self.sampled += 1
            flat = [row for group in batch.responses for row in group]
            if len(prompts) != len(flat):
                raise RuntimeError(f"TRL asks for {len(prompts)} samples, {len(flat)} were recorded")
            own = [prompt for prompt in batch.prompts for _ in range(shape.samples)]
            given = [" ".join(f"w{i}" for i in prompt) for prompt in own]
            if given != prompts:
                raise RuntimeError("TRL asks for other prompts than those recorded")
            return {"prompt_ids": own, "completion_ids": flat, "logprobs": [[0.0] * len(row) for row in flat]}

        run = self

        class Watch(TrainerCallback):  # type: ignore[misc]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if logs and "loss" in logs:
                    run.seen.append(StepSeen(float(logs["loss"]), float(logs["grad_norm"])))

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                run.on_step(state.global_step)

        self.trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Watch()],
            **({} if own_sampling else {"rollout_func": recorded}),
        )
        self.trainer.remove_callback(PrinterCallback)

    def train(self) -> None:
        """All steps; ``on_step(n)`` is called after each."""
        self.trainer.train()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters, by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}
