"""`ActorRole`: one rank of the policy in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from rlmesh import SendsWeights, current_worker, rpc
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms.protocol import Normalisers
from rlmesh.rl.components import Columns, policy_share
from rlmesh.rl.engines.training.packed import PackedBatch, PackedPart
from rlmesh.rl.engines.training.protocol import Lora, TrainingEngine, TrainingOptions
from rlmesh.rl.packing import Pack
from rlmesh.rl.trainers.settings import ActorSettings

__all__ = ["ActorRole", "Share", "make_engine"]

CHECKPOINT = "actor"


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of an optimizer step.

    Attributes:
        packs: of this rank; may be none.
        columns: of each pack, on the CPU.
        empty: the columns of a pack without targets.
        normalisers: of the whole batch, over all ranks.
    """

    packs: tuple[Pack, ...]
    columns: tuple[Columns, ...]
    empty: Columns
    normalisers: Normalisers


class ActorRole(SendsWeights):
    """Trains the policy on packs, and gives its weights to the rollout engines.

    Every method is collective: the trainer calls it on all ranks at once. Override `make_model` for a model of your
    own, or `loss` for another loss.
    """

    engine: TrainingEngine

    def setup(self) -> None:
        self.run_settings: Any = current_worker().job_info.user_config
        self.settings: ActorSettings = self.run_settings.actor
        if self.settings.threads and not torch.cuda.is_available():
            torch.set_num_threads(self.settings.threads)
        self.device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.engine = make_engine(self.run_settings.train, self.make_model(), self.settings)
        self.restore()

    def teardown(self) -> None:
        self.engine.close()
        dist.destroy_process_group()

    def make_model(self) -> nn.Module:
        """The model to train: the run's, in float32, on this rank's device."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.run_settings.model, dtype=torch.float32)
        return model.to(self.device)

    @rpc
    def log_probs(self, packs: Sequence[Pack]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the targets of this rank's packs, ``[targets]`` each, at the sampling temperature."""
        found = self.engine.packed_log_probs(packs, temperature=self.run_settings.rollout.temperature)
        return [terms.log_probs.float().cpu().numpy() for terms in found]

    @rpc
    def update(self, share: Share) -> dict[str, float]:
        """Make one optimizer step per epoch on this rank's share of a batch.

        Returns:
            means over the tokens of the whole batch, and norms; the same on every rank.
        """
        reports = []
        for _ in range(self.settings.epochs):
            columns = [_on(self.device, each) for each in share.columns]
            batch = PackedBatch(share.packs, columns, _on(self.device, share.empty), self.device)
            reports.append(self.engine.train_step(batch, partial(self.loss, normalisers=share.normalisers)))
        tokens = max(reports[-1].statistics.get("tokens", 0.0), 1.0)
        names = {"clipped": "clip_fraction", "ratio": "ratio_mean", "entropy": "entropy", "kl": "kl_step"}
        found = {
            label: sum(report.statistics[name] for report in reports) / len(reports) / tokens
            for name, label in names.items()
            if name in reports[-1].statistics
        }
        return {
            **found,
            "policy_loss": sum(report.loss for report in reports) / len(reports),
            "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
            "lr": reports[-1].lr,
            "trained_tokens": tokens,
        }

    def loss(self, model: nn.Module, part: PackedPart, normalisers: Normalisers) -> tuple[Tensor, Mapping[str, Tensor]]:
        """This pack's share of the loss, and shares of statistics; see `TrainingEngine.train_step`."""
        terms = model(packed=part.inputs, temperature=self.run_settings.rollout.temperature)
        return policy_share(terms, part.columns, normalisers, self.run_settings.algorithm)

    @property
    def version(self) -> int:
        """The number of steps of the run that these weights have seen."""
        return self.engine.steps // self.settings.epochs

    @property
    def pushed(self) -> Lora | None:
        """The form of the weights that engines get: with LoRA the adapter alone, merged for engines without adapters;
        None: all weights."""
        if self.settings.lora.rank == 0:
            return None
        return "adapter" if self.run_settings.rollout.engine == "transformers" else "merged"

    @rpc
    def restore(self) -> int:
        """Go back to the latest checkpoint if there is one, and offer the weights.

        Returns:
            the version of the weights.
        """
        folder = checkpoint_folder()
        if (folder / "current.json").exists():
            self.engine.load(folder)
        self.send_weights(self.engine.named_tensors(lora=self.pushed), restored=self.version)
        return self.version

    @rpc
    def save(self) -> int:
        """Write a checkpoint, and give its version once it is complete on all ranks."""
        self.engine.save(checkpoint_folder()).result()
        return self.version

    @rpc
    def export(self, folder: str) -> None:
        """Write the policy as a folder that ``from_pretrained`` reads."""
        self.engine.export(Path(folder))


def checkpoint_folder() -> Path:
    """The folder of the actor's checkpoints in the run directory."""
    return Path(current_worker().run_dir) / "checkpoints" / CHECKPOINT


def make_engine(kind: str, model: nn.Module, settings: ActorSettings) -> TrainingEngine:
    """A training engine by its name.

    Raises:
        UsageError: there is no engine of this name.
    """
    warmup = settings.warmup_steps * settings.epochs
    options = TrainingOptions(
        lr=settings.lr,
        schedule=(lambda steps: min(1.0, (steps + 1) / warmup)) if warmup else None,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        activation_checkpointing=settings.activation_checkpointing,
        precision=settings.precision,
        lora=settings.lora.options(),
    )
    if kind == "ddp":
        from rlmesh.rl.engines.training.ddp import DDPEngine

        return DDPEngine(model, options)
    if kind == "fsdp2":
        from rlmesh.rl.engines.training.fsdp2 import FSDP2Engine

        return FSDP2Engine(model, options)
    if kind in ("zero1", "zero2", "zero3"):
        from rlmesh.rl.engines.training.zero import DeepSpeedEngine

        return DeepSpeedEngine(model, options, stage=int(kind[-1]))  # type: ignore[arg-type]
    raise UsageError(f"train={kind!r}: the engines are ddp, fsdp2, zero1, zero2 and zero3")


def _on(device: torch.device, columns: Columns) -> Columns:
    """The same columns on a device."""
    moved = {
        one.name: value.to(device) for one in fields(columns) if isinstance(value := getattr(columns, one.name), Tensor)
    }
    return replace(columns, **moved)
