"""`ModuleEngine`: the common part of all engines. Engines of torch add the wrapping of the model; DeepSpeed's engine
also adds the computation and application of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from rlmesh import ModuleSource, WeightSource
from rlmesh.errors import UsageError
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.checkpoint.exporting import write_safetensors
from rlmesh.rl.engines.training.checkpoint.folders import SavingThread
from rlmesh.rl.engines.training.forward import response_log_probs, response_values
from rlmesh.rl.engines.training.offload import Offloaded
from rlmesh.rl.engines.training.packed import PackedBatch, PackedInputs, prepare
from rlmesh.rl.engines.training.protocol import (
    Lora,
    LossFunction,
    Saving,
    Splittable,
    StepReport,
    TrainingOptions,
)
from rlmesh.rl.head import TokenTerms
from rlmesh.rl.masking import deferred_checks
from rlmesh.rl.packing import Pack

_LOSS = "\0loss"
T = TypeVar("T")


class ModuleEngine(ABC):
    """See `TrainingEngine` for the methods. Subclasses set ``model``, the module that is called, and ``plain``, the
    module inside it, whose names are used."""

    model: nn.Module
    plain: nn.Module

    def __init__(self, options: TrainingOptions) -> None:
        self.options = options
        self.steps = 0
        self.rank, self.ranks = ranks.here()
        self._offloaded: Offloaded | None = None
        self._saver = SavingThread()
        # Checkpoints are written during training: their collectives need a group of their own.
        self._side = ranks.side_group()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.plain.parameters()).device

    # Forward.

    def log_probs(
        self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, *, temperature: float = 1.0
    ) -> Tensor:
        def part(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
            return response_log_probs(self.model, sequences, attention_mask, action_mask, temperature=temperature)

        return self._measure(part, sequences, attention_mask, action_mask)

    def values(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
        def part(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> Tensor:
            return response_values(self.model, sequences, attention_mask, action_mask)

        return self._measure(part, sequences, attention_mask, action_mask)

    def _measure(self, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """Apply a function to micro-batches; all ranks use equally many, since a pass is a collective step."""
        self._require_here("compute")
        self.model.eval()
        parts = self._parts(len(columns[0]))
        pieces = zip(*(column.to(self.device).tensor_split(parts) for column in columns), strict=True)
        with torch.no_grad(), self._autocast():
            return torch.cat([function(*piece) for piece in pieces]).float()

    def packed_log_probs(self, packs: Sequence[Pack], *, temperature: float = 1.0) -> list[TokenTerms]:
        def part(inputs: PackedInputs) -> TokenTerms:
            terms = self.model(packed=inputs, temperature=temperature)
            return TokenTerms(terms.log_probs, terms.entropy)

        return self._measure_packs(packs, part)

    def packed_values(self, packs: Sequence[Pack]) -> list[Tensor]:
        def part(inputs: PackedInputs) -> Tensor:
            values: Tensor = self.model(packed=inputs)
            return values

        return self._measure_packs(packs, part)

    def _measure_packs(self, packs: Sequence[Pack], function: Callable[[PackedInputs], T]) -> list[T]:
        """Apply a function to packs; all ranks make equally many passes, since a pass is a collective step."""
        self._require_here("compute")
        prepare(self.plain)
        self.model.eval()
        passes = PackedBatch(packs, [None] * len(packs), None, self.device).split(self._passes(len(packs)))
        with torch.no_grad(), self._autocast():
            return [function(part.inputs) for part in passes][: len(packs)]

    def _passes(self, packs: int) -> int:
        """The number of passes over packs: that of the rank with the most packs."""
        return max(1, ranks.largest(packs, self.device))

    def _parts(self, rows: int) -> int:
        """The number of micro-batches: that of the rank with the most rows."""
        size = self.options.micro_batch_size or max(rows, 1)
        return max(1, ranks.largest(-(-rows // size), self.device))

    def _autocast(self) -> torch.autocast:
        """The autocast context, for engines whose wrapper does not set the precision itself."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=False)

    # Training.

    def train_step(self, batch: Splittable, loss: LossFunction) -> StepReport:
        self._require_here("train")
        self.model.train()
        if isinstance(batch, PackedBatch):
            prepare(self.plain)
            parts: Sequence[Any] = batch.split(self._passes(batch.passes))
        else:
            parts = batch.split(self._parts(len(batch)))
        lr = self.options.lr_after(self.steps)
        sums: dict[str, Tensor] = {}
        self._before_step(lr)
        try:
            # The checks of all passes are evaluated once, before the gradient is applied.
            with deferred_checks():
                for index, part in enumerate(parts):
                    with self._one_pass(last=index == len(parts) - 1):
                        with self._autocast():
                            share, statistics = loss(self.model, part)
                        self._backward(share)
                    for name, value in {**statistics, _LOSS: share}.items():
                        sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value.detach()
            norm = self._apply()
        except BaseException:
            self._forget_gradients()
            raise
        self.steps += 1
        totals = ranks.summed(torch.stack(list(sums.values())).double()).tolist()
        named = dict(zip(sums, totals, strict=True))
        return StepReport(self.steps, named.pop(_LOSS), norm, lr, len(parts), named)

    @abstractmethod
    def _before_step(self, lr: float) -> None:
        """Set the learning rate, and clear old gradients."""

    @abstractmethod
    def _one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of one forward and backward pass; the last pass completes the gradient."""

    @abstractmethod
    def _backward(self, share: Tensor) -> None:
        """Add this part's gradient to the sum over parts and ranks."""

    @abstractmethod
    def _apply(self) -> float:
        """Clip, check and apply the gradient; returns its norm before clipping."""

    @abstractmethod
    def _forget_gradients(self) -> None: ...

    # Weights.

    def named_tensors(self, *, lora: Lora = "", adapter: str = "default") -> EngineSource:
        return EngineSource(self, self._source(lora, adapter))

    def _source(self, lora: Lora = "", adapter: str = "default") -> WeightSource:
        return ModuleSource(self.plain, lora=lora, adapter=adapter)

    def export(self, folder: Path) -> None:
        self._require_here("export")
        write_safetensors(Path(folder), self._source(), self.plain, self.rank)

    # Memory.

    def offload(self, folder: Path | None = None) -> None:
        if self._offloaded is None:
            self._saver.wait()
            self._forget_gradients()
            file = None if folder is None else Path(folder) / f"rank-{self.rank:05d}.offload"
            self._offloaded = Offloaded(self._memory(), file)

    def reload(self) -> None:
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    @abstractmethod
    def _memory(self) -> Iterator[Tensor]:
        """All tensors of this process that hold weights, gradients or optimizer state."""

    def _require_here(self, what: str) -> None:
        if self._offloaded is not None:
            raise UsageError(f"rank {self.rank} cannot {what}: its weights are offloaded; call reload() first")

    # Checkpoints.

    def save(self, folder: Path) -> Saving:
        self._require_here("save")
        self._saver.wait()
        return self._saver.start(self._write(Path(folder)))

    @abstractmethod
    def _write(self, folder: Path) -> Callable[[], Path]:
        """Copy the state; returns a function that writes it in the background."""

    def close(self) -> None:
        self._saver.wait()
        if self._offloaded is not None:
            self._offloaded.forget()
        ranks.end_group(self._side)
        self._side = None


class EngineSource:
    """A source of a `WeightSync` whose engine may be offloaded: its memory must not be kept open by sinks.

    If the engine is never offloaded, ``ModuleSource(engine.plain)`` can be faster on a GPU, since a sink may then keep
    the memory of the weights open.
    """

    lasting = False

    def __init__(self, engine: ModuleEngine, inner: WeightSource) -> None:
        self._engine, self._inner = engine, inner
        self.device = inner.device

    def manifest(self) -> Any:
        return self._inner.manifest()

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        self._engine._require_here("give its weights")
        with self._inner.gather(names) as tensors:
            yield {name: _exportable(tensor.detach()) for name, tensor in tensors.items()}

    def stamp(self) -> object:
        return self._engine.steps, self._inner.stamp()


def _exportable(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor that may become a NumPy array: torch never frees memory that NumPy refers to."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    imported: Tensor = from_dlpack(tensor)
    return imported
