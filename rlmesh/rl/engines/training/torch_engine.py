"""`TorchEngine`: engines whose gradients and optimizer are torch's own, and whose checkpoints are torch's DCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training import ranks
from rlmesh.rl.engines.training.base import ModuleEngine
from rlmesh.rl.engines.training.checkpoints import CheckpointFolder, Saved
from rlmesh.rl.engines.training.offload import own_memory
from rlmesh.rl.engines.training.protocol import TrainingOptions

KIND = "torch"


class TorchEngine(ModuleEngine):
    """A module and torch's AdamW.

    A checkpoint of one of these is loaded by any other, of any number of ranks.
    """

    def __init__(self, model: nn.Module, options: TrainingOptions) -> None:
        super().__init__(options)
        self.plain = model
        own_memory([*model.parameters(), *model.buffers()])
        # Checkpoints are written beside training: their collectives must not get between those of training.
        self._side = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.model = self._wrap(model)
        self.optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay,
        )  # fmt: skip

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def _before_step(self, lr: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _backward(self, share: Tensor) -> None:
        (share * self.ranks).backward()  # the wrappers average over the ranks, and shares add up

    def _apply(self) -> float:
        most = self.options.max_grad_norm or float("inf")
        found = nn.utils.clip_grad_norm_(self.plain.parameters(), most)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        if norm != norm or norm == float("inf"):
            raise FloatingPointError(
                f"the gradient of step {self.steps + 1} is not finite (norm {norm}); the step was not made, and the "
                "weights are as before"
            )
        self.optimizer.step()
        return norm

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _memory(self) -> Iterator[Tensor]:
        yield from self.plain.parameters()
        yield from self.plain.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    # Checkpoints.

    def _state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.plain, self.optimizer)
        return {"model": weights, "optimizer": optimizer}

    def _write(self, folder: Path) -> Callable[[], Path]:
        place, steps, side = CheckpointFolder(folder), self.steps, self._side
        name: str = ranks.from_first(place.begin(steps) if self.rank == 0 else None, side)
        data = folder / name
        writer = FileSystemWriter(data, single_file_per_rank=True, sync_files=True)
        writing: Any = async_save(self._state(), storage_writer=writer, process_group=side)

        def finish() -> Path:
            writing.result()
            fault = None
            if self.rank == 0:
                try:
                    place.commit(Saved(name, steps, KIND, self.ranks))
                except OSError as error:
                    fault = str(error)
            fault = ranks.from_first(fault, side)
            if fault is not None:
                raise OSError(f"the checkpoint of step {steps} in {folder} could not be completed: {fault}")
            return data

        return finish

    def load(self, folder: Path) -> None:
        self._require_here("load")
        self._saver.wait()
        place = CheckpointFolder(Path(folder))
        saved = place.current()
        if saved.kind != KIND:
            raise UsageError(
                f"{folder} holds a checkpoint of kind {saved.kind}, and {type(self).__name__} loads {KIND}"
            )
        state = self._state()
        read_state(state, checkpoint_id=place.data_of(saved), process_group=self._side)
        set_state_dict(self.plain, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = saved.steps
