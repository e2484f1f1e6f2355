"""Experience from samples: scores, log-probabilities and values of four roles, computed in parallel, then GAE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlmesh.rl import Sample
from rlmesh.rl.advantages import gae
from rlmesh.rl.drift import DriftAlarm, drift
from rlmesh.rl.kl import kl_estimate, token_rewards
from rlmesh.rl.masking import masked_mean, masked_whiten

from . import remote_call
from .common import Batch, Experience, pad_values
from .config import PPOConfig

ALARM = DriftAlarm("float32")


@dataclass(frozen=True)
class MadeExperience:
    experience: Experience
    metrics: dict[str, float]


def require_version(samples: Sequence[Sample], version: int) -> None:
    """Check that all samples are of the expected version.

    Raises:
        RuntimeError: at least one sample has another version.
    """
    found = {of for s in samples for of, _, _ in s.version_spans}
    if found != {version}:
        raise RuntimeError(
            f"samples come from policy versions {sorted(found)}, expected {version} only: "
            "a rollout engine missed a weight sync"
        )


def make_experience(
    samples: Sequence[Sample], answers: Sequence[str], config: PPOConfig, pad_token_id: int
) -> MadeExperience:
    """Call reward, actor, critic and reference in parallel, and combine their results."""
    batch = Batch.of(samples, pad_token_id)
    reward = remote_call.reward_forward([s.token_ids for s in samples], answers)
    actor = remote_call.actor_forward(batch)
    critic = remote_call.critic_forward(batch)
    reference = remote_call.reference_forward(batch) if config.init_kl_coef != 0 else actor
    scores = torch.tensor(list(reward))
    log_probs, values, ref_log_probs = (torch.stack(list(rows)) for rows in (actor, critic, reference))

    mask = batch.action_mask
    sampled_log_probs = pad_values([s.log_probs for s in samples], mask.shape[1])
    gap = drift(log_probs, sampled_log_probs, mask)
    if gap.max_abs > config.max_log_prob_gap:
        raise RuntimeError(
            f"log-probabilities of actor and rollout engines differ by up to {gap.max_abs:.3g} "
            f"(limit {config.max_log_prob_gap}): they do not hold the same weights"
        )
    alarm = ALARM.check(gap, version=samples[0].policy_version or 0)
    kl = kl_estimate(log_probs, ref_log_probs, mask, "k1")
    rewards = token_rewards(scores, kl, mask, coefficient=config.init_kl_coef)
    advantages, returns = gae(rewards, values, mask, gamma=config.gamma, lam=config.lam)
    experience = Experience(
        sequences=batch.sequences,
        attention_mask=batch.attention_mask,
        action_mask=mask,
        log_probs=log_probs,
        values=values,
        advantages=masked_whiten(advantages, mask),
        returns=returns,
    )
    metrics = {
        "reward_mean": scores.mean().item(),
        "kl": masked_mean(kl, mask).item(),
        **alarm,
        "response_length": mask.sum(1).float().mean().item(),
    }
    return MadeExperience(experience, metrics)
