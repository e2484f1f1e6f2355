"""`TrainedRole`: the common part of actor and critic: one rank of a model in training."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmesh import current_worker, rpc
from rlmesh.errors import SourceRestarted, UsageError
from rlmesh.rl.algorithms.protocol import Normalisers
from rlmesh.rl.checkpoints.restoring import beginning_of
from rlmesh.rl.checkpoints.state import seed_generators
from rlmesh.rl.checkpoints.store import checkpoint_folder, read_checkpoint, saved_step
from rlmesh.rl.components import Columns
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.liger import use_liger_layers
from rlmesh.rl.engines.training.packed import PackedBatch, prepare
from rlmesh.rl.engines.training.protocol import Saving, StepReport, TrainingEngine, TrainingOptions
from rlmesh.rl.packing import Pack
from rlmesh.rl.roles.defaults import choose_device, keep_objects, run_settings
from rlmesh.rl.roles.device_turns import TakesTurns
from rlmesh.rl.trainers.settings import ActorSettings

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run

__all__ = ["Share", "TrainedRole", "make_engine"]

TRAINING = "training"
GATHERED_WHOLE_BYTES = 16 << 20
"""FSDP2 gathers a smaller model as a whole: gathering it layer by layer would save little memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's part of an optimizer step.

    Attributes:
        packs: the packs of this rank; may be empty.
        columns: the columns of each pack, on the CPU.
        empty: the columns of a pack without targets, for the passes of a rank with fewer packs than others.
        normalisers: the normalisers of the whole batch over all ranks, divided by the number of optimizer steps per
            epoch.
        tokens: number of tokens of the whole batch with a weight in the policy component, divided by the same number.
    """

    packs: tuple[Pack, ...]
    columns: tuple[Columns, ...]
    empty: Columns
    normalisers: Normalisers
    tokens: float


class TrainedRole(TakesTurns):
    """One rank of a model in training. Every method is collective: the trainer calls it on all ranks at once."""

    section: str
    """Name of the role's section in the settings of the run, and of its folder in a checkpoint."""
    engine: TrainingEngine
    who: tuple[str, int]
    """Role and rank."""
    saving: tuple[int, Saving] | None = None
    """The checkpoint that was begun last: its step and its progress."""
    begun = False
    """True once the weights are those of the beginning of the run, or of one of its checkpoints."""

    def setup(self) -> None:
        self.run_settings: Run = run_settings()
        self.settings: ActorSettings = getattr(self.run_settings, self.section)
        self.who = current_worker().role, current_worker().rank
        self.device = choose_device(self.settings.threads)
        self.own_group = not dist.is_initialized()
        if self.own_group:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.turns = self.make_turns()
        with self.turns.lease():
            self.make_parts()
            # Rank 0 decides for all, since the trainer may complete a checkpoint at any moment.
            self.restore(ranks.from_first(saved_step(self.run_dir)))
        keep_objects()

    def teardown(self) -> None:
        if "engine" in self.__dict__:
            self.engine.close()
        if getattr(self, "own_group", False) and dist.is_initialized():
            dist.destroy_process_group()

    def make_parts(self) -> None:
        """Make the engines and models that use the device, and add each to ``self.turns``."""
        self.engine = self.make_engine()
        self.turns.add(TRAINING, wake=lambda: self.engine.reload(), sleep=lambda: self.engine.offload())

    def make_engine(self) -> TrainingEngine:
        """Make a new model, and the training engine that the settings name.

        Raises:
            UsageError: the model cannot compute packs, or see :func:`make_engine`.
        """
        model = self.make_model()
        if self.run_settings.trains and hasattr(model, "set_attn_implementation"):
            prepare(model)  # before the weights are sharded: the first call compares packs with rows alone
        return make_engine(self.run_settings.train, model, self.settings, self.run_settings.steps)

    def make_model(self) -> nn.Module:
        """The model to train, in float32, on this rank's device."""
        raise TypeError(f"{type(self).__name__} defines no make_model()")

    def train(self, shares: Sequence[Share], loss: Any) -> list[StepReport]:
        """Make an optimizer step on each of this rank's shares, once per epoch."""
        seed_generators(self.run_settings.seed, self.version + 1, self.who)
        reports = []
        for epoch in range(self.settings.epochs):
            if epoch:
                shares = [*map(self.next_share, shares)]
            for share in shares:
                columns = [_on(self.device, each) for each in share.columns]
                batch = PackedBatch(share.packs, columns, _on(self.device, share.empty), self.device)
                reports.append(self.engine.train_step(batch, loss))
        return reports

    def next_share(self, share: Share) -> Share:
        """The share for the next epoch, given the share of the last epoch."""
        return share

    # Versions.

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(current_worker().run_dir)

    @property
    def version(self) -> int:
        """The number of steps of the run that these weights have seen."""
        return self.engine.steps // self.settings.updates

    def require(self, version: int) -> None:
        """Check that the weights are those of ``version``: a role that restarted has lost steps.

        Raises:
            SourceRestarted: the weights have seen another number of steps of the run.
        """
        if self.version != version:
            raise SourceRestarted(
                f"{current_worker().name} has the weights of step {self.version}, not of step {version}: it restarted"
            )

    @rpc
    def finished_steps(self) -> int:
        """The number of steps of the run that these weights have seen; −1 if they have seen a part of the next one."""
        return -1 if self.engine.steps % self.settings.updates else self.version

    @rpc
    def restore(self, step: int) -> None:
        """Return to the weights and the optimizer state of a step.

        Does nothing if the role is at this step. Otherwise the state comes from the step's checkpoint or, for step 0,
        from the initial model and the checkpoint that ``Run(restore=…)`` names.

        Raises:
            UsageError: the step has no checkpoint, or a part of it is incomplete or was altered.
        """
        self.end_saving()
        as_made = step == 0 and not self.begun and self.run_settings.restore is None
        if as_made or (self.begun and self.version == step and self.engine.steps % self.settings.updates == 0):
            self.begun = True
            return
        with self.turns.turn(TRAINING):
            if step:
                checkpoint = read_checkpoint(checkpoint_folder(self.run_dir, step))
                self.engine.load(checkpoint.require_part(self.section))
            else:
                if self.begun:
                    self.engine.close()
                    gc.unfreeze()  # lets the old engine be collected
                    self.engine = self.make_engine()
                    keep_objects()
                if beginning := beginning_of(self.run_settings):
                    beginning.load(self.section, self.engine)
        self.begun = True

    @rpc
    def save(self, version: int) -> str:
        """Copy the state of a finished step, and begin to write it. Returns ``""``, or the fault that prevents it."""
        self.require(version)
        self.end_saving()
        with self.turns.turn(TRAINING):
            try:
                self.saving = version, self.engine.save(checkpoint_folder(self.run_dir, version) / self.section)
            except OSError as error:
                return str(error)
        return ""

    @rpc(concurrent=2)
    def saved(self, version: int, wait_s: float) -> str | None:
        """The result of `save`: ``""`` if the part is complete on all ranks, else the fault; ``None`` if it is still
        being written after ``wait_s`` seconds."""
        if self.saving is None or self.saving[0] != version:
            return f"{current_worker().name} restarted while it wrote step {version}"
        try:
            self.saving[1].result(wait_s)
        except TimeoutError:
            return None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def end_saving(self) -> None:
        """Wait until no checkpoint is being written."""
        if self.saving is not None:
            with suppress(Exception):  # `saved` reports the error
                self.saving[1].result()


def make_engine(kind: str, model: nn.Module, settings: ActorSettings, steps: int) -> TrainingEngine:
    """A training engine by its name.

    Args:
        kind: name of the engine.
        model: the model to train.
        settings: settings of the role.
        steps: steps of the run, over which the learning rate falls.

    Raises:
        UsageError: there is no engine of this name, or Liger's layers are required and cannot be used.
    """
    use_liger_layers(model, settings.use_liger_kernel)
    options = TrainingOptions(
        lr=settings.lr,
        schedule=lambda updates: settings.lr_share(updates, steps),
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

        size = sum(parameter.nbytes for parameter in model.parameters())
        return FSDP2Engine(model, options, layers=[] if size < GATHERED_WHOLE_BYTES else None)
    if kind in ("zero1", "zero2", "zero3"):
        from rlmesh.rl.engines.training.zero import DeepSpeedEngine

        return DeepSpeedEngine(model, options, stage=int(kind[-1]))  # type: ignore[arg-type]
    raise UsageError(f"train={kind!r}: the engines are ddp, fsdp2, zero1, zero2 and zero3")


def mean_of(reports: Sequence[StepReport], name: str) -> float:
    """The mean of a statistic over the tokens that the losses of all optimizer steps counted (statistic ``tokens``)."""
    tokens = sum(report.statistics.get("tokens", 0.0) for report in reports)
    return sum(report.statistics[name] for report in reports) / max(tokens, 1.0)


def common_metrics(reports: Sequence[StepReport]) -> Mapping[str, float]:
    """Loss and norm, each a mean over optimizer steps, and the last learning rate."""
    return {
        "loss": sum(report.loss for report in reports) / len(reports),
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "lr": reports[-1].lr,
    }


def _on(device: torch.device, columns: Columns) -> Columns:
    """The same columns on a device."""
    moved = {
        one.name: value.to(device) for one in fields(columns) if isinstance(value := getattr(columns, one.name), Tensor)
    }
    return replace(columns, **moved)
