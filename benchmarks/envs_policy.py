"""The policy of the libraries of benchmarks/envs_compare.py that only step environments: 64 × 64 tanh, sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def policy(seed: int) -> Callable[[Any], Any]:
    """Chooses actions for observations ``[N, 4]`` of CartPole-v1; it also computes values, as PPO needs them."""
    torch.manual_seed(seed)

    def network(out: int) -> torch.nn.Module:
        hidden = [torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
        return torch.nn.Sequential(*hidden, torch.nn.Linear(64, out))

    actor, critic = network(2), network(1)

    def choose(obs: Any) -> Any:
        with torch.inference_mode():
            rows = torch.as_tensor(obs)
            chosen = torch.distributions.Categorical(logits=actor(rows), validate_args=False)
            actions = chosen.sample()
            chosen.log_prob(actions)
            critic(rows)
        return actions.numpy()

    return choose
