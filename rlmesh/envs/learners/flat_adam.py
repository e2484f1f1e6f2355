"""Adam over one flat tensor: small networks need few kernels per step, and torch's compiler is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rlmesh.errors import UsageError

__all__ = ["FlatAdam"]


class FlatAdam:
    """Adam (Kingma and Ba 2015, algorithm 1) with the formula and the defaults of ``torch.optim.Adam``.

    Parameters and gradients become views of one tensor each. A step is then one call of torch's fused kernel, whatever
    the number of layers. The constructor of an optimizer of torch imports torch's compiler, which takes one to two
    seconds.

    A parameter whose values were moved elsewhere, as by ``module.to()`` or ``vector_to_parameters``, becomes a view
    again in `zero_grad`. A parameter that was frozen since is left as it is.

    Args:
        parameters: of one element type, on one device.
        lr, betas, eps: as of ``torch.optim.Adam``.

    Attributes:
        param_groups: one dict with ``lr``, which may be set between steps.
        flat: the values of all parameters.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:  # fmt: skip
        self.parameters = list(parameters)
        self.betas, self.eps = betas, eps
        self.param_groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": lr}]
        self.count = 0
        self._bind()
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)

    def _bind(self) -> None:
        """Make parameters and gradients views of one tensor each, with the values that they have."""
        if not self.fits(self.parameters):
            kinds = ", ".join(sorted({f"{p.dtype} on {p.device}" for p in self.parameters}))
            raise UsageError(
                f"the parameters of a learner were moved since it was made, and are now {kinds}: move the whole module "
                "alike, or make the policy anew"
            )
        values = [p.detach().reshape(-1) for p in self.parameters]
        self.flat = torch.cat(values) if values else torch.zeros(0)
        self.gradient = torch.zeros_like(self.flat)
        self._step = torch.zeros((), dtype=torch.float32, device=self.flat.device)  # what the kernel reads
        self._views: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        start = 0
        for p in self.parameters:
            end = start + p.numel()
            view, own = (whole[start:end].view_as(p) for whole in (self.flat, self.gradient))
            if p.grad is not None:
                own.copy_(p.grad)
            p.grad = None  # one of another type would not let the values be set
            p.data = view
            p.grad = own
            self._views.append(view)
            self._gradients.append(own)
            start = end

    def attach(self) -> None:
        """Take in parameters whose values somebody moved elsewhere."""
        if any(p.data_ptr() != view.data_ptr() for p, view in zip(self.parameters, self._views, strict=True)):
            self._bind()
            self.mean, self.square = self.mean.to(self.flat), self.square.to(self.flat)

    def __getstate__(self) -> dict[str, Any]:
        views = ("flat", "gradient", "_step", "_views", "_gradients")
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()

    @staticmethod
    def fits(parameters: Iterable[torch.nn.Parameter]) -> bool:
        """True for parameters of one element type on one device, and for none."""
        return len({(p.dtype, p.device) for p in parameters}) <= 1

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set gradients to zero; they stay views of one tensor, and parameters that were moved become views again."""
        self.attach()
        self._gather()
        self.gradient.zero_()

    def clip(self, most: float) -> torch.Tensor:
        """Scale the gradients so that their norm is at most ``most``; returns the norm from before."""
        self._gather()
        norm: torch.Tensor = torch.linalg.vector_norm(self.gradient)
        self.gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def whole_gradient(self) -> torch.Tensor:
        """The gradients of all parameters, as the tensor that `step` reads."""
        self._gather()
        return self.gradient

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters by their gradients."""
        self._gather()
        self.count += 1
        beta1, beta2 = self.betas
        self._step.fill_(self.count)
        kept = self._frozen()
        torch._fused_adam_(
            [self.flat], [self.gradient], [self.mean], [self.square], [], [self._step], lr=self.param_groups[0]["lr"],
            beta1=beta1, beta2=beta2, weight_decay=0.0, eps=self.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        for part, before in kept:
            part.copy_(before)

    def _frozen(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Values and moments of the parameters that were frozen since, each with a copy: moments would move them."""
        if all(p.requires_grad for p in self.parameters):
            return []
        sizes = [p.numel() for p in self.parameters]
        each = zip(self.parameters, *(whole.split(sizes) for whole in (self.flat, self.mean, self.square)), strict=True)
        return [(part, part.clone()) for p, *parts in each if not p.requires_grad for part in parts]

    def _gather(self) -> None:
        """Take in gradients that somebody replaced, for instance by ``module.zero_grad()``."""
        for p, own in zip(self.parameters, self._gradients, strict=True):
            if p.grad is not own:
                own.zero_() if p.grad is None else own.copy_(p.grad)
                p.grad = own

    def state_dict(self) -> dict[str, Any]:
        """Moments and their count, in memory of their own."""
        return {"mean": self.mean.clone(), "square": self.square.clone(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `state_dict`."""
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
        self.count = state["count"]
