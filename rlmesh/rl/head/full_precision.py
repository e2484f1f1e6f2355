"""`FullPrecisionLinear`: a linear map whose results are float32, whatever the precision of the layers before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FullPrecisionLinear"]


class FullPrecisionLinear(nn.Linear):
    """A linear map that is computed in float32 at least. Autocast does not apply, and weights that were cast to a lower
    precision are cast back."""

    full_precision = True
    """Engines that gather weights in a lower precision gather those of this module as they are."""

    def forward(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        bias: Tensor | None = self.bias  # a reward model has none
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.to(wide), self.weight.to(wide), None if bias is None else bias.to(wide))
