"""V-trace: targets and advantages for steps that an older policy sampled."""

from __future__ import annotations

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
    with torch.no_grad():
        ratios = log_ratios.exp()
        rho = ratios if clip_rho is None else ratios.clamp(max=clip_rho)
        pg_rho = ratios if clip_pg_rho is None else ratios.clamp(max=clip_pg_rho)
        after = torch.where(goes_on, _next(values), bootstraps)
        deltas = rho * (rewards + gamma * after - values)
        targets = values + discounted_sums(deltas, gamma * ratios.clamp(max=1.0) * goes_on)
        after = torch.where(goes_on, _next(targets), bootstraps)
        return targets, pg_rho * (rewards + gamma * after - values)


def discounted_sums(terms: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """``x_t = terms_t + decay_t · x_{t+1}``, for all rows at once.

    Each round doubles the number of terms that a sum has, so the rounds are the logarithm of the longest trajectory.

    Args:
        terms: ``[rows]``.
        decay: within 0 and 1; 0 in the last row of each trajectory, ``[rows]``.
    """
    reach = 1
    while reach < len(terms) and bool(decay.any()):
        terms = torch.cat([terms[:-reach] + decay[:-reach] * terms[reach:], terms[-reach:]])
        decay = torch.cat([decay[:-reach] * decay[reach:], torch.zeros_like(decay[-reach:])])
        reach *= 2
    return terms


def _next(column: torch.Tensor) -> torch.Tensor:
    """The column, one row earlier; the last row is repeated."""
    return torch.cat([column[1:], column[-1:]])
