"""`TrainingEngine`: the interface of training engines, with its input and output types.

Shapes: a batch has ``[batch, time]`` tokens, prompts padded on the left and responses on the right, so that the last
``response`` columns are the responses. Units: learning rates per optimizer step, norms in the units of the gradient.

All methods of an engine are collective: every rank of its role calls them, in the same order. They are not
thread-safe, except those of `Saving`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rlmesh.errors import UsageError
from rlmesh.rl.engines.lora import LoraOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlmesh import WeightSource
    from rlmesh.rl.head import TokenTerms
    from rlmesh.rl.packing import Pack

Precision = Literal["float32", "bfloat16"]
Lora = Literal["", "adapter", "merged"]


class Splittable(Protocol):
    """A batch of one rank. ``split(n)`` returns ``n`` consecutive parts, some empty if there are fewer rows."""

    def __len__(self) -> int: ...

    def split(self, parts: int) -> Sequence[Any]: ...


B = TypeVar("B", bound=Splittable)

LossFunction = Callable[["nn.Module", Any], tuple["Tensor", Mapping[str, "Tensor"]]]
"""A function from the model to call and a part of the batch to the part's share of the loss and shares of statistics,
all scalars.

Shares *add up* over the parts and over all ranks to the loss of the whole batch, like the results of
`rlmesh.rl.losses.aggregate` with the count of the whole batch. So the result depends neither on the number of ranks nor
on the micro-batch size."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options of all engines.

    Attributes:
        lr: peak learning rate of AdamW.
        schedule: function from the number of finished optimizer steps to a factor for ``lr``; it has no state, so
            checkpoints omit it.
        betas, eps: parameters of AdamW.
        weight_decay: weight decay of AdamW. Norms and biases, the weights of one dimension, do not decay.
        max_grad_norm: limit of the gradient's norm over all parameters and ranks, by scaling; 0: no limit.
        micro_batch_size: row limit of one forward and backward pass on a rank; 0: no limit.
        activation_checkpointing: drop activations inside the layers, and recompute them in the backward pass.
        precision: dtype of forward and backward passes. With "bfloat16" the optimizer still uses float32 weights.
        lora: train an adapter instead of the weights. Optimizer state and checkpoints then contain the adapter only.
    """

    lr: float = 1e-6
    schedule: Callable[[int], float] | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_size: int = 0
    activation_checkpointing: bool = False
    precision: Precision = "float32"
    lora: LoraOptions | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.lr < 0:
            faults.append(f"lr={self.lr}: it is 0 or more")
        if self.max_grad_norm < 0:
            faults.append(f"max_grad_norm={self.max_grad_norm}: it is 0 (never) or more")
        if self.micro_batch_size < 0:
            faults.append(f"micro_batch_size={self.micro_batch_size}: it is 0 (all rows) or more")
        if self.precision not in ("float32", "bfloat16"):
            faults.append(f"precision={self.precision!r}: it is 'float32' or 'bfloat16'")
        if faults:
            raise UsageError("TrainingOptions: " + "; ".join(faults))

    def lr_after(self, steps: int) -> float:
        """The learning rate of the optimizer step that follows ``steps`` finished ones."""
        return self.lr * (self.schedule(steps) if self.schedule is not None else 1.0)


@dataclass(frozen=True)
class StepReport:
    """The result of one optimizer step, equal on every rank.

    Attributes:
        step: number of finished optimizer steps, including this one.
        loss: loss of the whole batch, over all ranks.
        grad_norm: norm of the gradient before clipping, over all parameters and ranks.
        lr: learning rate of this step.
        micro_batches: passes per rank.
        statistics: statistics of the loss function, summed over all parts and ranks.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    micro_batches: int
    statistics: Mapping[str, float] = field(default_factory=dict)


class Saving(Protocol):
    """A checkpoint that is being written while the engine may train on."""

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete on all ranks and is the current one; returns its folder.

        Raises:
            the error of writing it. The previous checkpoint still exists.
        """
        ...

    def done(self) -> bool: ...


class TrainingEngine(Protocol):
    """A model in training on all ranks of a role.

    Attributes:
        options: the engine's options.
        steps: number of finished optimizer steps.
        rank, ranks: this rank, and the number of ranks.
    """

    options: TrainingOptions
    steps: int
    rank: int
    ranks: int

    def log_probs(
        self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, *, temperature: float = 1.0
    ) -> Tensor:
        """Log-probabilities of the responses' tokens, without gradient.

        Args:
            sequences: ``[batch, time]``, integers.
            attention_mask: ``[batch, time]``, True at tokens, False at padding.
            action_mask: ``[batch, response]``, True at the tokens that count.
            temperature: the temperature of sampling.

        Returns:
            ``[batch, response]``, float32 (float64 of a model of that type), 0 where the mask is False.
        """
        ...

    def values(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        """A critic's values before each of the responses' tokens, without gradient.

        The model returns ``[batch, time, 1]``, or an object with these as ``logits``.

        Returns:
            ``[batch, response]``, float32 (float64 of a model of that type), 0 where the mask is False.
        """
        ...

    def packed_log_probs(self, packs: Sequence[Pack], *, temperature: float = 1.0) -> list[TokenTerms]:
        """The log-probability and entropy of each target of this rank's packs, without gradient.

        Args:
            packs: the packs of this rank; ranks may have different numbers of them.
            temperature: the temperature of sampling.
        """
        ...

    def packed_values(self, packs: Sequence[Pack]) -> list[Tensor]:
        """A critic's value before each target of this rank's packs, ``[targets]`` each, without gradient.

        The model takes ``packed=PackedInputs`` and gives one value per target, as
        :class:`rlmesh.rl.roles.value_head.ValueModel` does.
        """
        ...

    def train_step(self, batch: Splittable, loss: LossFunction) -> StepReport:
        """Make an optimizer step on this rank's share of a batch: forward and backward passes over its parts; then the
        gradient is summed over parts and ranks, clipped and applied.

        A :class:`rlmesh.rl.engines.training.packed.PackedBatch` takes one pass per pack; other batches are split into
        micro-batches of rows.

        The ranks' shares may differ in size: each rank makes as many passes as the rank with the most.

        Raises:
            FloatingPointError: the gradient is not finite; no rank has changed anything.
        """
        ...

    def named_tensors(self, *, lora: Lora | None = None, adapter: str = "default") -> WeightSource:
        """The weights as the source of a `WeightSync`: names are those of the plain model, tensors whole.

        Args:
            lora: for a peft model. "adapter": the adapter's tensors only, for an engine with the base model and an
                adapter of the same options. "merged": the base model's tensors with the adapter added, for any engine.
                "": all tensors, unchanged. None: "adapter" if the options have ``lora``, else "".
            adapter: name of the adapter.
        """
        ...

    def save(self, folder: Path) -> Saving:
        """Write weights, optimizer and step count, from which `load` resumes exactly. Returns when they are copied;
        they are written in the background. ``folder`` has a complete checkpoint at any time, even after a kill.
        """
        ...

    def load(self, folder: Path, *, trust_others: bool = False, weights_only: bool = False) -> None:
        """Load the checkpoint that `save` wrote.

        Args:
            folder: folder of the checkpoint. It and everything in it must belong to you or to root, and no other user
                may be able to write there.
            trust_others: load a checkpoint that other users own or can write to, such as a colleague's. It is read as
                data and cannot run code, but anyone who can write to it can change your weights.
            weights_only: load the weights alone; optimizer state and step count stay those of a new engine.

        Raises:
            UsageError: there is no complete checkpoint, it is of another kind, a file of it is incomplete or was
                altered, or another user can have written it.
        """
        ...

    def export(self, folder: Path, *, adapter_only: bool = False) -> None:
        """Write the weights as safetensors, with the model's configuration, for `from_pretrained` of transformers. Rank
        0 writes.

        Args:
            adapter_only: write the adapter in peft's format (``PeftModel.from_pretrained``), instead of the weights
                with the adapter added.

        Raises:
            UsageError: there is no adapter.
        """
        ...

    def offload(self, folder: Path | None = None) -> None:
        """Move weights, gradients and optimizer state off the device until `reload`: to host memory, or to a file in
        ``folder``. Other methods raise until then. May be called twice."""
        ...

    def reload(self) -> None:
        """Restore what `offload` moved, bit for bit. May be called twice."""
        ...

    def close(self) -> None:
        """Wait for checkpoints that are being written, and release the model."""
        ...
