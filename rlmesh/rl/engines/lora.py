"""`LoraOptions`: low-rank adapters, which are trained in place of a model's weights. peft makes and computes them.

An adapted layer computes ``W x + (alpha / rank) · B A x``; W is frozen, and B is 0 at the beginning, so training begins
with the model itself (Hu et al. 2021, arXiv:2106.09685). Trainer and rollout engine add the same adapter to the same
base model, so a push contains the adapter only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlmesh.errors import UsageError
from rlmesh.rl.faults import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["LoraOptions", "add_adapter", "base_model_of", "base_sums", "require_same_base"]

ALL_LINEAR = "all-linear"
SAME_BASE = 1e-6
"""The largest allowed difference between two sums of a weight, relative to the sum of its magnitudes: devices add in
different orders."""


@dataclass(frozen=True)
class LoraOptions:
    """The settings of an adapter. Dropout is not among them: with it, the ratio of two equal policies would not be 1.

    Attributes:
        rank: rank of the matrices A ``[rank, in]`` and B ``[out, rank]``, ≥ 1.
        alpha: the adapter is scaled by ``alpha / rank``; None: ``2 · rank``.
        target_modules: names, or ends of names, of the linear layers with an adapter; ``"all-linear"``: all but the
            head.
        seed: seed of the initial values of A, which are equal on every rank and engine.

    Raises:
        UsageError: lists the settings that are out of range.
    """

    rank: int = 16
    alpha: float | None = None
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    seed: int = 0

    def __post_init__(self) -> None:
        faults = []
        rank: Any = self.rank
        alpha: Any = self.alpha
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            faults.append(f"rank={self.rank!r}: it is a whole number ≥ 1")
        if alpha is not None and not (isinstance(alpha, int | float) and alpha > 0):
            faults.append(f"alpha={self.alpha!r}: it is > 0, or None for twice the rank")
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            faults.append(f"target_modules={self.target_modules!r}: it is {ALL_LINEAR!r}, or a list of names")
        elif not self.target_modules:
            faults.append("target_modules is empty: no layer would be trained")
        if faults:
            raise UsageError("LoraOptions: " + "; ".join(faults))

    @property
    def scale(self) -> float:
        """The factor of ``B A``."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


def add_adapter(model: nn.Module, options: LoraOptions) -> nn.Module:
    """Add an adapter to a causal language model of transformers, in place; returns peft's wrapper, in which only the
    adapter's parameters are trained.

    Raises:
        UsageError: peft is not installed, the model has an adapter already, or a target does not exist or is the head.
    """
    import torch

    if hasattr(model, "peft_config"):
        raise UsageError("the model has an adapter already: give the plain model, or leave lora out")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError(f"LoRA needs peft ({error}): pip install 'rlmesh[lora]'") from error
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = options.target_modules
    if targets != ALL_LINEAR:
        _check_targets(model, targets, linear)
    whole: Any = model
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.scale * options.rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        adapted: nn.Module = get_peft_model(whole, config)
    _keep_precision(adapted)
    return adapted


def _keep_precision(adapted: nn.Module) -> None:
    """Let the adapter of a layer with full precision have it too: the result is the sum of both."""
    from rlmesh.rl.head.full_precision import FullPrecisionLinear

    for layer in adapted.modules():
        if getattr(getattr(layer, "base_layer", None), "full_precision", False):
            parts: Any = [layer.lora_A, layer.lora_B]
            for matrix in (one for part in parts for one in part.values()):
                matrix.__class__ = FullPrecisionLinear


def _check_targets(model: nn.Module, targets: str | tuple[str, ...], linear: set[str]) -> None:
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    faults = []
    for target in targets:
        found = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not found:
            known = sorted({name.rpartition(".")[2] for name in linear})
            hint = did_you_mean(target, known, f"; the linear layers are {', '.join(known)}")
            faults.append(f"the model has no linear layer {target!r}{hint}")
        elif head is not None and any(model.get_submodule(name) is head for name in found):
            faults.append(f"{target!r} is the head, which cannot have an adapter: packed passes use its weight")
    if faults:
        raise UsageError("LoraOptions.target_modules: " + "; ".join(faults))


def base_model_of(model: nn.Module) -> Any:
    """The model of transformers inside peft's wrapper, with adapters in its layers; a model without wrapper itself."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def base_sums(model: nn.Module) -> Tensor:
    """Two sums of each frozen weight, ``[weights, 2]`` in float64: the sum of its values, and of their magnitudes. With
    them, a checkpoint of an adapter recognises its base model."""
    import torch

    with torch.no_grad():
        rows = [
            torch.stack([weight.detach().double().sum(), weight.detach().double().abs().sum()]).cpu()
            for weight in model.parameters()
            if not weight.requires_grad
        ]
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)


def require_same_base(mine: Tensor, saved: Tensor, where: object) -> None:
    """Check that an adapter was trained on this base model.

    Args:
        mine: the `base_sums` of this model.
        saved: the `base_sums` in the checkpoint.
        where: the checkpoint's folder, for the error.

    Raises:
        UsageError: the sums of a weight differ by more than `SAME_BASE`.
    """
    gap = (mine[:, 0] - saved[:, 0]).abs() / saved[:, 1].clamp(min=1e-30)
    far = int((~(gap <= SAME_BASE)).sum())
    if far:
        raise UsageError(
            f"the adapter in {where} was trained on another base model: {far} of its {len(mine)} weights differ. Load "
            "the base model that the run began with"
        )
