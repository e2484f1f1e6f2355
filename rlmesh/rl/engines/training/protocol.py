"""`TrainingEngine`, and the values that go in and out of it.

Shapes: a batch has ``[batch, time]`` tokens, prompts padded on the left and responses on the right, so that the last
``response`` columns are the responses. Units: learning rates per optimizer step, norms in the units of the gradient.

All methods of an engine are collective: every rank of its role calls them, in the same order. They are not safe for
threads, but for `Saving`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlmesh.rl.head import TokenTerms
    from rlmesh.rl.packing import Pack

Precision = Literal["float32", "bfloat16"]
Lora = Literal["", "adapter", "merged"]


class Splittable(Protocol):
    """A batch of one rank. ``split(n)`` gives ``n`` consecutive parts, empty ones where there are fewer rows."""

    def __len__(self) -> int: ...

    def split(self, parts: int) -> Sequence[Any]: ...


B = TypeVar("B", bound=Splittable)

LossFunction = Callable[["nn.Module", Any], tuple["Tensor", Mapping[str, "Tensor"]]]
"""(model to call, part of the batch) → (this part's share of the loss, shares of statistics), all scalars.

Shares *add up* over the parts and over all ranks to the loss of the whole batch, as those of
`rlmesh.rl.losses.aggregate` do with the count of the whole batch. So the result depends neither on the number of ranks
nor on how many rows go through the model at once."""


@dataclass(frozen=True)
class TrainingOptions:
    """What all engines take.

    Attributes:
        lr: peak learning rate of AdamW.
        schedule: optimizer steps done so far → share of ``lr``; a pure function, so that a checkpoint need not hold it.
        betas, eps, weight_decay: of AdamW.
        max_grad_norm: the gradient, over all parameters and ranks, is scaled down to at most this norm; 0: never.
        micro_batch_size: the most rows that one forward and backward pass takes on a rank; 0: all of them.
        activation_checkpointing: forget activations inside the layers, and compute them again in the backward pass.
        precision: of forward and backward passes. With "bfloat16" the optimizer still works on float32 weights.
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
        """The learning rate of the step that comes after ``steps`` steps."""
        return self.lr * (self.schedule(steps) if self.schedule is not None else 1.0)


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, the same on every rank.

    Attributes:
        step: optimizer steps done, this one included.
        loss: of the whole batch, over all ranks.
        grad_norm: before clipping, over all parameters and ranks.
        lr: that was used.
        micro_batches: passes per rank.
        statistics: what the loss function gave, added up over all parts and ranks.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    micro_batches: int
    statistics: Mapping[str, float] = field(default_factory=dict)


class Saving(Protocol):
    """A checkpoint that is being written. The engine may train on meanwhile."""

    def result(self, timeout_s: float | None = None) -> Path:
        """Wait until it is complete on all ranks and counts as the latest; gives its folder.

        Raises:
            the error of writing it. The checkpoint before it is still there.
        """
        ...

    def done(self) -> bool: ...


class SyncableSource(Protocol):
    """What a `WeightSync` takes weights from: `rlmesh.ModuleSource` and its like."""

    device: str
    lasting: bool

    def manifest(self) -> Any: ...

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Any]]: ...

    def stamp(self) -> object: ...


class TrainingEngine(Protocol):
    """A model in training on all ranks of a role.

    Attributes:
        options: what it was made with.
        steps: optimizer steps done.
        rank, ranks: this one, and how many there are.
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
            temperature: that of sampling.

        Returns:
            ``[batch, response]``, float32, 0 where the mask is False.
        """
        ...

    def values(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        """Of a critic: the values before each of the responses' tokens, without gradient.

        Its model gives ``[batch, time, 1]``, or an object that has these as ``logits``.

        Returns:
            ``[batch, response]``, float32, 0 where the mask is False.
        """
        ...

    def packed_log_probs(self, packs: Sequence[Pack], *, temperature: float = 1.0) -> list[TokenTerms]:
        """Log-probability of each target of this rank's packs, and the entropy at it, without gradient.

        Args:
            packs: of this rank; ranks may have different numbers of them.
            temperature: that of sampling.
        """
        ...

    def train_step(self, batch: Splittable, loss: LossFunction) -> StepReport:
        """One optimizer step on this rank's share of a batch: forward and backward passes over its parts, the gradient
        summed over parts and ranks, clipped, applied.

        A :class:`rlmesh.rl.engines.training.packed.PackedBatch` makes one pass per pack; other batches are split into
        micro-batches of rows.

        The ranks' shares may differ in size: each rank makes as many passes as the fullest needs.

        Raises:
            FloatingPointError: the gradient is not finite; nothing was changed on any rank.
        """
        ...

    def named_tensors(self, *, lora: Lora = "", adapter: str = "default") -> SyncableSource:
        """The weights as the source of a `WeightSync`: names are those of the plain model, tensors whole.

        Args:
            lora: of a peft model: "adapter" gives the adapter's tensors only, "merged" the base model's names with the
                adapter added in; "" everything as it is.
            adapter: which adapter.
        """
        ...

    def save(self, folder: Path) -> Saving:
        """Write weights, optimizer and step count so that `load` goes on exactly from here. Returns when they are
        copied; they are written on the side. ``folder`` always holds the last complete one, whatever is killed when.
        """
        ...

    def load(self, folder: Path, *, trust_others: bool = False) -> None:
        """Take back what `save` wrote.

        Args:
            folder: of the checkpoint. It and everything in it must belong to you or to root, and nobody else may write
                there.
            trust_others: load it all the same, such as a colleague's. It is read as data and cannot run code, but
                whoever can write there says what the weights are.

        Raises:
            UsageError: there is no complete checkpoint, it is of another kind, or somebody else can have written it.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write the weights as safetensors, with the model's configuration: `from_pretrained` of transformers reads
        them. Rank 0 writes."""
        ...

    def offload(self, folder: Path | None = None) -> None:
        """Give the device's memory of weights, gradients and optimizer state free, until `reload`: into the host's
        memory, or into a file of ``folder``. All else raises meanwhile. Twice is once."""
        ...

    def reload(self) -> None:
        """Bring back what `offload` took away, bit for bit. Twice is once."""
        ...

    def close(self) -> None:
        """Wait for checkpoints under way, and forget the model."""
        ...
