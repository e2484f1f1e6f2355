"""`DeepSpeedEngine`: DeepSpeed's ZeRO. Stage 1 shards optimizer state, stage 2 gradients too, stage 3 all weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from rlmesh import ZeroSource
from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.activation_checkpointing import checkpoint_activations
from rlmesh.rl.engines.training.base import ModuleEngine
from rlmesh.rl.engines.training.checkpoint.distributed_state import read_state, require_whole, write_state
from rlmesh.rl.engines.training.checkpoint.folders import CheckpointFolder
from rlmesh.rl.engines.training.checkpoint.staging import Copied
from rlmesh.rl.engines.training.checkpoint.zero_state import inner_state, load_state, state_of
from rlmesh.rl.engines.training.offload import own_memory
from rlmesh.rl.engines.training.protocol import Lora, TrainingOptions
from rlmesh.rl.engines.training.torch_engine import make_adamw

Stage = Literal[1, 2, 3]


class DeepSpeedEngine(ModuleEngine):
    """A model under DeepSpeed, with torch's AdamW.

    With precision "bfloat16" the weights of passes and syncs are bfloat16; the optimizer keeps float32 weights.

    Checkpoints have torch's format, with whole tensors: any number of ranks, any stage, and the engines of torch can
    load them. DeepSpeed's own checkpoints are only for the number of ranks that wrote them.

    Args:
        model: a plain model, with its weights.
        options: see `TrainingOptions`.
        stage: stage of ZeRO.
        config: further configuration of DeepSpeed; keys that follow from ``options`` are refused.
    """

    def __init__(
        self, model: nn.Module, options: TrainingOptions, *, stage: Stage = 2, config: Mapping[str, Any] | None = None
    ) -> None:
        deepspeed = _import_deepspeed()
        if stage not in (1, 2, 3):
            raise UsageError(f"DeepSpeedEngine(stage={stage!r}): ZeRO has the stages 1, 2 and 3")
        backend = "nccl" if next(model.parameters()).is_cuda else "gloo"
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        super().__init__(options)
        self.stage = stage
        self.plain = model = self._adapted(model)
        if options.activation_checkpointing:
            checkpoint_activations(model)
        own_memory([*model.parameters(), *model.buffers()])
        optimizer = make_adamw(model, options, fused=False)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(options, stage, config or {})
        )
        self.model = self.engine

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, which wraps torch's."""
        return self.engine.optimizer

    # Training.

    def _before_step(self, lr: float) -> None:
        if not self.steps:
            inner_state(self.engine)  # DeepSpeed needs the state of all groups after its step on the first one
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _one_pass(self, *, last: bool) -> AbstractContextManager[object]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def _backward(self, share: Tensor) -> None:
        # DeepSpeed averages over ranks, but shares must add up.
        self.engine.backward(share * self.ranks, scale_wrt_gas=False)

    def _apply(self, norm: float | None) -> float:
        self.engine.step()
        if self.optimizer.overflow:
            raise FloatingPointError(
                f"the gradient of step {self.steps + 1} is not finite; the step was not made, and the weights are as "
                "before"
            )
        return float(self.engine.get_global_grad_norm())

    def _forget_gradients(self) -> None:
        self.engine.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            held = getattr(self.optimizer, name, {})
            for key in held:
                held[key] = None
        # With another number, DeepSpeed would add to the gradients of the last step.
        self.optimizer.micro_step_id = 0 if self.stage == 3 else -1

    # Weights and memory.

    def _source(self, lora: Lora = "", adapter: str = "default") -> ZeroSource:
        return ZeroSource(self.engine, lora=lora, adapter=adapter)

    def _memory(self) -> Iterator[Tensor]:
        for parameter in self.plain.parameters():
            yield parameter
            if hasattr(parameter, "ds_tensor"):
                yield parameter.ds_tensor
        yield from self.plain.buffers()
        yield from _tensors_in(vars(self.optimizer), depth=4)
        yield from _tensors_in(list(self.optimizer.optimizer.state.values()), depth=2)

    # Checkpoints.

    def _write(self, folder: Path) -> Callable[[], Path]:
        frozen = self.options.lora is None
        state = state_of(self.engine, self._source(), self.rank, self.ranks, frozen=frozen) | self._base_state()
        return write_state(folder, state, self.steps, self._side, Copied())

    def load(self, folder: Path, *, trust_others: bool = False, weights_only: bool = False) -> None:
        self._require_here("load")
        self._saver.wait()
        place = CheckpointFolder(Path(folder), trust_others=trust_others)
        saved = place.current()
        require_whole(place, saved, self._side)

        def read(state: dict[str, Any]) -> None:
            if weights_only:
                for moments in state.pop("optimizer", {}).values():
                    for moment in moments.values():
                        moment.zero_()
            read_state(place, saved, state, self._side)

        if base := self._base_state():
            read(base)
            self._require_base(base, folder)
        load_state(self.engine, self._source(), self.rank, read, frozen=self.options.lora is None)
        if not weights_only:
            self.steps = saved.steps

    def close(self) -> None:
        super().close()
        self.engine.destroy()


def deepspeed_config(options: TrainingOptions, stage: Stage, more: Mapping[str, Any]) -> dict[str, Any]:
    """Make the configuration for ``deepspeed.initialize``.

    Raises:
        UsageError: ``more`` has keys that follow from the options.
    """
    owned: dict[str, Any] = {
        # The engine splits batches itself: the number of passes is known when a step begins.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm,
        "bf16": {"enabled": options.precision == "bfloat16"},
    }
    taken = sorted({*owned, "train_batch_size", "optimizer", "scheduler", "fp16"} & set(more))
    if taken or "stage" in more.get("zero_optimization", {}):
        refused = taken or ["zero_optimization.stage"]
        raise UsageError(f"DeepSpeedEngine(config=…): {', '.join(refused)} follow from the options and the stage")
    zero = {"stage": stage, **more.get("zero_optimization", {})}
    rest = {key: value for key, value in more.items() if key != "zero_optimization"}
    return {**owned, "zero_optimization": zero, "zero_allow_untested_optimizer": True, "steps_per_print": None, **rest}


def _import_deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise UsageError(f"DeepSpeedEngine needs deepspeed ({error}): pip install 'rlmesh[deepspeed]'") from error
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    """All tensors within lists, mappings and plain records."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0:
        return
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = list(vars(value).values())
    else:
        return
    for each in inside:
        yield from _tensors_in(each, depth - 1)
