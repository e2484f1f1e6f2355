"""`ModuleEngine`: the common part of all training engines.

The subclasses for torch add the wrapping of the model; DeepSpeed's engine also adds the computation and application of
gradients."""

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
from rlmesh.rl.engines.host_memory import KeptRooms
from rlmesh.rl.engines.lora import add_adapter, base_model_of, base_sums, require_same_base
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.checkpoint.exporting import write_adapter, write_safetensors
from rlmesh.rl.engines.training.checkpoint.folders import SavingThread
from rlmesh.rl.engines.training.checkpoint.staging import HostStage
from rlmesh.rl.engines.training.forward import at_least_float32, response_log_probs, response_values
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
from rlmesh.rl.masking import CollectedChecks, collected_checks
from rlmesh.rl.packing import Pack

_LOSS = "\0loss"
T = TypeVar("T")
BASE = "base"


class ModuleEngine(ABC):
    """See `TrainingEngine` for the methods. Subclasses set ``model``, the module that is called, and ``plain``, the
    module inside it (from `_adapted`), which has the names of the weights."""

    model: nn.Module
    plain: nn.Module

    def __init__(self, options: TrainingOptions) -> None:
        self.options = options
        self.steps = 0
        self.rank, self.ranks = ranks.here()
        self._offloaded: Offloaded | None = None
        self._rooms = KeptRooms()
        self._saver = SavingThread()
        self._stage = HostStage()
        # Checkpoints are written while training continues, so their collectives need their own group.
        self._side = ranks.side_group()
        # The ranks agree on the number of passes on the CPU.
        self._control = ranks.side_group()
        self._base_sums: Tensor | None = None

    def _adapted(self, model: nn.Module) -> nn.Module:
        """The model, with an adapter if the options have one."""
        if self.options.lora is None:
            return model
        adapted = add_adapter(model, self.options.lora)
        self._base_sums = base_sums(adapted)
        return adapted

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
            return at_least_float32(torch.cat([function(*piece) for piece in pieces]))

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
        """The number of passes: the number of packs of the rank with the most packs."""
        return max(1, ranks.largest(packs, self._control))

    def _parts(self, rows: int) -> int:
        """The number of micro-batches of the rank with the most rows."""
        size = self.options.micro_batch_size or max(rows, 1)
        return max(1, ranks.largest(-(-rows // size), self._control))

    def _autocast(self) -> torch.autocast:
        """The autocast context of a pass, for engines whose wrapper does not set the precision."""
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
            with collected_checks() as checks:
                for index, part in enumerate(parts):
                    with self._one_pass(last=index == len(parts) - 1):
                        with self._autocast():
                            share, statistics = loss(self.model, part)
                        self._backward(share)
                    for name, value in {**statistics, _LOSS: share}.items():
                        sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value.detach()
            norm, named = self._finish_step(checks, sums)
        except BaseException:
            self._forget_gradients()
            raise
        self.steps += 1
        return StepReport(self.steps, named.pop(_LOSS), norm, lr, len(parts), named)

    def _finish_step(self, checks: CollectedChecks, sums: Mapping[str, Tensor]) -> tuple[float, dict[str, float]]:
        """Check and apply the gradient; returns its norm, and the sums over the ranks.

        The results of all checks, the sums and the norm come from the device in one transfer. The ranks exchange failed
        checks together with the sums, so that no rank applies a gradient, or waits, after a check failed on another
        rank.
        """
        failures = checks.failures(self.device)
        shares = torch.stack([*sums.values(), failures.sum()]).double()
        totals, norm = ranks.summed(shares), self._clipped_norm()
        known = torch.cat([failures, totals, norm.double().reshape(-1).to(self.device)]).tolist()
        own, known = known[: len(failures)], known[len(failures) :]
        checks.raise_first(own)
        if known[len(sums)]:
            raise FloatingPointError(
                f"step {self.steps + 1}: a value is not finite on another rank; the step was not made, and the weights "
                "are as before"
            )
        found = self._apply(known[len(sums) + 1] if norm.numel() else None)
        return found, dict(zip(sums, known, strict=False))

    def _clipped_norm(self) -> Tensor:
        """Clip the gradient; returns its norm before clipping, on the device. Empty if `_apply` clips."""
        return torch.zeros(0, device=self.device)

    @abstractmethod
    def _before_step(self, lr: float) -> None:
        """Set the learning rate, and clear old gradients."""

    @abstractmethod
    def _one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of one forward and backward pass; the last pass completes the gradient."""

    @abstractmethod
    def _backward(self, share: Tensor) -> None:
        """Add the gradient of a part to the sum over parts and ranks."""

    @abstractmethod
    def _apply(self, norm: float | None) -> float:
        """Check and apply the gradient; returns its norm before clipping.

        Args:
            norm: the result of `_clipped_norm`; None: it was empty.
        """

    @abstractmethod
    def _forget_gradients(self) -> None: ...

    # Weights.

    def named_tensors(self, *, lora: Lora | None = None, adapter: str = "default") -> EngineSource:
        if lora is None:
            lora = "" if self.options.lora is None else "adapter"
        return EngineSource(self, self._source(lora, adapter))

    def _source(self, lora: Lora = "", adapter: str = "default") -> WeightSource:
        return ModuleSource(self.plain, lora=lora, adapter=adapter)

    def export(self, folder: Path, *, adapter_only: bool = False) -> None:
        self._require_here("export")
        if adapter_only and not hasattr(self.plain, "peft_config"):
            raise UsageError("export(adapter_only=True): the model has no adapter; TrainingOptions(lora=…) adds one")
        if adapter_only:
            write_adapter(Path(folder), self._source("adapter"), self.plain, self.rank)
        else:
            lora: Lora = "merged" if hasattr(self.plain, "peft_config") else ""
            write_safetensors(Path(folder), self._source(lora), base_model_of(self.plain), self.rank)

    # Memory.

    def offload(self, folder: Path | None = None) -> None:
        if self._offloaded is None:  # a checkpoint that is being written has its own copy
            self._forget_gradients()
            file = None if folder is None else Path(folder) / f"rank-{self.rank:05d}.offload"
            self._offloaded = Offloaded(self._memory(), file, self._rooms)

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

    def _base_state(self) -> dict[str, Tensor]:
        """The part of a checkpoint that identifies the base model of an adapter."""
        return {} if self._base_sums is None else {BASE: self._base_sums.clone()}

    def _require_base(self, state: Mapping[str, Any], folder: Path) -> None:
        if self._base_sums is not None:
            require_same_base(self._base_sums, state[BASE], folder)

    def close(self) -> None:
        self._saver.wait()
        self._stage.close()
        if self._offloaded is not None:
            self._offloaded.forget()
        for group in (self._side, self._control):
            ranks.end_group(group)
        self._side = self._control = None


class EngineSource:
    """The source of a `WeightSync` for an engine that may be offloaded.

    It is not ``lasting``: if sinks kept the memory of the weights open, `offload` could not free it.

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
    """A tensor with a storage of its own over the same memory, for sinks that make a NumPy array of it.

    Torch cannot free a storage from which a NumPy array was made, so `offload` could not free the engine's own storage.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    imported: Tensor = from_dlpack(tensor)
    return imported
