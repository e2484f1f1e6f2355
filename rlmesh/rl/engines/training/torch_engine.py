"""`TorchEngine`: engines whose gradients and optimizer are torch's own, and whose checkpoints are torch's DCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from rlmesh.rl.engines.training.base import ModuleEngine
from rlmesh.rl.engines.training.checkpoint.distributed_state import read_state, require_whole, write_state
from rlmesh.rl.engines.training.checkpoint.folders import CheckpointFolder
from rlmesh.rl.engines.training.offload import own_memory
from rlmesh.rl.engines.training.protocol import TrainingOptions


def make_adamw(model: nn.Module, options: TrainingOptions, *, fused: bool) -> torch.optim.AdamW:
    """AdamW over the trained parameters of a model. Norms and biases, the weights of one dimension, do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if options.weight_decay:
        vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
        groups = [group for group in ({"params": [p for p in trained if p.ndim > 1]}, vectors) if group["params"]]
    return torch.optim.AdamW(
        groups, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, fused=fused
    )


class TorchEngine(ModuleEngine):
    """A module and torch's AdamW. Any `TorchEngine`, with any number of ranks, loads the checkpoints of any other."""

    def __init__(self, model: nn.Module, options: TrainingOptions) -> None:
        super().__init__(options)
        self.plain = model = self._adapted(model)
        own_memory([*model.parameters(), *model.buffers()])
        self.model = self._wrap(model)
        # The fused kernel is the fastest one, and needs no memory of its own.
        self.optimizer = make_adamw(model, options, fused=self.device.type in ("cpu", "cuda"))

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def _before_step(self, lr: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _backward(self, share: Tensor) -> None:
        (share * self.ranks).backward()  # the wrappers average over ranks, but shares must add up

    def _clipped_norm(self) -> Tensor:
        most = self.options.max_grad_norm or float("inf")
        found = nn.utils.clip_grad_norm_(self.plain.parameters(), most)
        return found.full_tensor() if isinstance(found, DTensor) else found

    def _apply(self, norm: float | None) -> float:
        assert norm is not None
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
        """The state of weights and optimizer, by names of the model, without the options."""
        # Without a step so far, get_state_dict would make the optimizer's state by a dummy step, and count it.
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state.update({moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")})
        weights, optimizer = get_state_dict(self.plain, self.optimizer, options=self._state_options)
        if (
            self.options.lora is not None
        ):  # torch leaves frozen parameters out, but not their further names: a tied head
            every = self.plain.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in every if not parameter.requires_grad}
            weights = {name: tensor for name, tensor in weights.items() if name not in frozen}
        return {"model": weights, "optimizer": optimizer["state"], **self._base_state()}

    @property
    def _state_options(self) -> StateDictOptions:
        lora = self.options.lora is not None
        return StateDictOptions(ignore_frozen_params=lora, strict=not lora)

    def _write(self, folder: Path) -> Callable[[], Path]:
        return write_state(folder, self._state(), self.steps, self._side, self._stage)

    def load(self, folder: Path, *, trust_others: bool = False, weights_only: bool = False) -> None:
        self._require_here("load")
        self._saver.wait()
        place = CheckpointFolder(Path(folder), trust_others=trust_others)
        saved = place.current()
        require_whole(place, saved, self._side)
        state = self._state()
        if weights_only:
            del state["optimizer"]
        read_state(place, saved, state, self._side)
        self._require_base(state, folder)
        if weights_only:
            set_model_state_dict(self.plain, state["model"], options=self._state_options)
            return
        groups = get_optimizer_state_dict(self.plain, self.optimizer)["param_groups"]
        set_state_dict(
            self.plain,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict={"state": state["optimizer"], "param_groups": groups},
            options=self._state_options,
        )
        self.steps = saved.steps
