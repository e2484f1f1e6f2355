"""Statistics over the valid tokens only, and checks that the valid tokens are finite.

A mask is applied with ``where``, never by multiplication: zero times NaN is NaN, so a product would let one
bad value in a padded slot poison the whole batch.

Each check waits for the device. A training step that checks many tensors collects the checks and waits once::

    with deferred_checks():
        loss = …            # any number of functions of rlmesh.rl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "CollectedChecks",
    "collected_checks",
    "deferred_checks",
    "keep",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "require_finite",
    "require_mask",
]


@dataclass(frozen=True, slots=True)
class _Check:
    """A check whose result is still on the device.

    Attributes:
        failed: a scalar; not 0 if the check failed.
        details: scalars that the message needs.
        error: makes the exception from ``failed`` and ``details``.
    """

    failed: Tensor
    details: tuple[Tensor, ...]
    error: Callable[..., Exception]

    def raise_if_failed(self) -> None:
        if bool(self.failed):
            raise self.error(self.failed.item(), *(detail.item() for detail in self.details))


_deferred: ContextVar[CollectedChecks | None] = ContextVar("_deferred", default=None)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Collect the checks of the block and evaluate them once, at its end.

    On a GPU each check waits for the device; one training step makes about twenty. In this block the checks compute
    their results on the device, and one transfer at the end fetches all of them. The first failed check raises. If the
    block itself raises, its checks are dropped.

    Blocks may be nested: the checks of the inner block are evaluated at its own end.

    Raises:
        FloatingPointError: a valid slot was not finite.
        ValueError: a denominator was too small (:func:`rlmesh.rl.losses.aggregate`).
    """
    with collected_checks() as checks:
        yield
    checks.evaluate()


class CollectedChecks:
    """Checks whose results are still on their devices."""

    def __init__(self) -> None:
        self._checks: list[_Check] = []

    def add(self, check: _Check) -> None:
        self._checks.append(check)

    def failures(self, device: torch.device) -> Tensor:
        """``[checks]`` of float64 on a device, 1 where a check failed, for a transfer with other numbers."""
        if not self._checks:
            return torch.zeros(0, dtype=torch.float64, device=device)
        return torch.stack([(check.failed != 0).to(device, torch.float64) for check in self._checks])

    def raise_first(self, failures: Sequence[float]) -> None:
        """Raise the error of the first failed check, by the numbers of `failures`."""
        for check, failed in zip(self._checks, failures, strict=True):
            if failed:
                check.raise_if_failed()

    def evaluate(self) -> None:
        """Wait for the devices, once for each, and raise the error of the first failed check."""
        by_device: dict[torch.device, list[_Check]] = {}
        for check in self._checks:
            by_device.setdefault(check.failed.device, []).append(check)
        failed = {
            id(check)
            for group in by_device.values()
            for check, bad in zip(group, torch.stack([c.failed != 0 for c in group]).tolist(), strict=True)
            if bad
        }
        self.raise_first([float(id(check) in failed) for check in self._checks])


@contextmanager
def collected_checks() -> Iterator[CollectedChecks]:
    """Collect the checks of the block, for the caller to evaluate together with other results of the device."""
    checks = CollectedChecks()
    token = _deferred.set(checks)
    try:
        yield checks
    finally:
        _deferred.reset(token)


def require(failed: Tensor, error: Callable[..., Exception], *details: Tensor) -> None:
    """Raise ``error(failed, *details)`` if ``failed`` is not 0: now, or at the end of :func:`deferred_checks`.

    Args:
        failed: a scalar.
        error: makes the exception from the Python numbers of ``failed`` and ``details``.
        details: scalars on any device.
    """
    check = _Check(failed.detach(), tuple(detail.detach() for detail in details), error)
    checks = _deferred.get()
    if checks is None:
        check.raise_if_failed()
    else:
        checks.add(check)


def require_mask(mask: Tensor, *, like: Tensor, name: str) -> Tensor:
    """``mask`` as booleans, after a check that its shape is that of ``like``.

    Broadcasting is refused, since a mask of shape ``[batch, 1]`` or ``[time]`` is usually a mistake, which would change
    every mean without an error.

    Args:
        mask: boolean, or numbers of which all but 0 count as True.
        like: the tensor that it belongs to.
        name: name of ``like`` in the message.

    Raises:
        ValueError: the shapes differ.
    """
    if mask.shape != like.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but {name} has {tuple(like.shape)}: they must be equal; "
            "expand the mask yourself if you meant to broadcast it"
        )
    return mask if mask.dtype == torch.bool else mask != 0


def require_finite(x: Tensor, mask: Tensor, *, name: str) -> None:
    """Check that no valid slot holds NaN or infinity.

    Waits for the device, unless inside :func:`deferred_checks`.

    Args:
        x: any shape.
        mask: boolean, the same shape.
        name: name of ``x`` in the message.

    Raises:
        FloatingPointError: at least one does; the message has their number, the first index, and the first value.
    """
    if not x.numel():
        return
    shape = tuple(x.shape)
    bad = (mask & ~torch.isfinite(x.detach())).reshape(-1)
    first = bad.to(torch.uint8).argmax(keepdim=True)

    def error(count: int, place: int, value: float) -> FloatingPointError:
        index = [int(i) for i in torch.unravel_index(torch.tensor(place), shape)] if shape else []
        return FloatingPointError(
            f"{name} holds {int(count)} values that are not finite in valid slots, the first at {index}: {value}"
        )

    require(bad.sum(), error, first[0], x.detach().reshape(-1).gather(0, first)[0])


def keep(x: Tensor, mask: Tensor, *, name: str = "x") -> Tensor:
    """``x`` where the mask is True, 0 elsewhere; the gradient of masked slots is 0 too.

    Apply it *before* a function whose slope may be infinite (``exp``, ``log``): masking the result would leave
    0 · inf = NaN in the backward pass.

    Args:
        x: any shape.
        mask: the same shape.
        name: name of ``x`` in messages.

    Raises:
        ValueError: the shapes differ.
        FloatingPointError: a valid slot is not finite.
    """
    valid = require_mask(mask, like=x, name=name)
    require_finite(x, valid, name=name)
    return torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, *, dim: int | None = None, name: str = "x") -> Tensor:
    """Sum over the valid slots, of all of ``x`` or along ``dim``."""
    kept = keep(x, mask, name=name)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, *, dim: int | None = None, name: str = "x") -> Tensor:
    """Mean over the valid slots, of all of ``x`` or along ``dim``; 0 where none is valid.

    This is the mean of *this tensor alone*. For a loss that is split over micro-batches or ranks, use
    :func:`rlmesh.rl.losses.aggregate`, which divides by the count of the whole batch.
    """
    total = masked_sum(x, mask, dim=dim, name=name)
    valid = mask != 0
    count = valid.sum() if dim is None else valid.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Scale the valid slots to variance 1 and, with ``shift_mean``, to mean 0; masked slots become 0.

    ``(x − mean) / sqrt(var + eps)`` with the population variance (divided by n, as in Ziegler et al. 2019,
    arXiv:1909.08593), so it is defined for a single value.

    Args:
        x: any shape, usually advantages ``[batch, time]`` of the *whole* batch: whitening each shard of a batch alone
            gives another result.
        mask: the same shape.
        shift_mean: False keeps the mean and scales only.
        eps: added to the variance.
    """
    valid = require_mask(mask, like=x, name="x")
    mean = masked_mean(x, valid)
    deviation = keep(x, valid) - mean
    variance = masked_mean(deviation.square(), valid)
    white = deviation * torch.rsqrt(variance + eps)
    if not shift_mean:
        white = white + mean
    return keep(white, valid)
