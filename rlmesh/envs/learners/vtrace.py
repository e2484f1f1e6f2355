"""V-trace: targets and advantages for steps that an older policy sampled."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["discounted_sums", "vtrace"]


def vtrace(
    log_ratios: torch.Tensor, rewards: torch.Tensor, values: torch.Tensor, bootstraps: torch.Tensor,
    goes_on: torch.Tensor, gamma: float, *, clip_rho: float | None = 1.0, clip_pg_rho: float | None = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Targets of values and advantages of actions (Espeholt et al. 2018, equation 1 and section 4.2).

    ``v_s = V(x_s) + ρ_s·δ_s + γ·c_s·(v_{s+1} − V(x_{s+1}))`` with ``δ_s = r_s + γ·V(x_{s+1}) − V(x_s)``, within one
    trajectory; the advantage is ``ρ'_s·(r_s + γ·v_{s+1} − V(x_s))``. ρ and ρ' are the ratios clipped at ``clip_rho``
    and ``clip_pg_rho``, c those clipped at 1.

    Args:
        log_ratios: log-probability of the action by the policy that learns, minus that by the policy that sampled,
            ``[rows]``.
        rewards: ``[rows]``.
        values: V of the observation before the step, ``[rows]``.
        bootstraps: where the next row is not the next step of the same episode: V of the observation after the step,
            0 after a terminal step. Not read elsewhere. ``[rows]``.
        goes_on: True where the next row is the next step of the same episode, ``[rows]``; False in the last row.
        gamma: discount.
        clip_rho, clip_pg_rho: None for no limit.

    Returns:
        Targets and advantages, ``[rows]``, without gradients.
    """
    # On small arrays, NumPy's operations take a third of the time of torch's.
    logs, r, v, last, on = map(_array, (log_ratios, rewards, values, bootstraps, goes_on))
    with np.errstate(over="ignore", invalid="ignore"):  # the learner looks at its loss
        ratios = np.exp(logs)
        rho = ratios if clip_rho is None else np.minimum(ratios, clip_rho)
        pg_rho = ratios if clip_pg_rho is None else np.minimum(ratios, clip_pg_rho)
        deltas = rho * (r + gamma * np.where(on, _next(v), last) - v)
        targets = v + discounted_sums(deltas, gamma * np.minimum(ratios, 1.0) * on)
        advantages = pg_rho * (r + gamma * np.where(on, _next(targets), last) - v)
    return torch.from_numpy(targets).to(values), torch.from_numpy(advantages).to(values)


def discounted_sums(terms: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """``x_t = terms_t + decay_t · x_{t+1}``, for all rows at once.

    Each round doubles the number of terms that a sum has, so the rounds are the logarithm of the longest trajectory.

    Args:
        terms: ``[rows]``.
        decay: within 0 and 1; 0 in the last row of each trajectory, ``[rows]``.
    """
    sums, left = terms.copy(), decay.copy()
    reach = 1
    while reach < len(sums) and left.any():
        sums[:-reach] += left[:-reach] * sums[reach:]
        left[:-reach] *= left[reach:]
        left[-reach:] = 0
        reach *= 2
    return sums


def _next(column: np.ndarray) -> np.ndarray:
    """The column, one row earlier; the last row is repeated."""
    return np.concatenate([column[1:], column[-1:]])


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array; NumPy has no bfloat16."""
    found = tensor.detach().cpu()
    array: np.ndarray = (found.float() if found.dtype == torch.bfloat16 else found).numpy()
    return array
