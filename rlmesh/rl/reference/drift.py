"""Twin of :mod:`rlmesh.rl.drift`."""

from __future__ import annotations

import numpy as np

from rlmesh.rl.reference.masking import Array, Mask, valid_slots


def drift(trainer: Array, engine: Array, mask: Mask) -> tuple[float, float, float]:
    """Mean |d|, largest |d| and mean k3 = e^d − 1 − d, with d = trainer − engine."""
    gaps = [float(trainer[b, t] - engine[b, t]) for b, t in valid_slots(mask)]
    if not gaps:
        return 0.0, 0.0, 0.0
    count = len(gaps)
    return sum(map(abs, gaps)) / count, max(map(abs, gaps)), sum(float(np.exp(d)) - 1 - d for d in gaps) / count
