"""`ResultDict`: nested metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlmesh.envs.runners.episode_stats import EpisodeStats

__all__ = ["EpisodeWindow", "ResultDict", "flattened"]


class ResultDict(dict[str, Any]):
    """Metrics by name; values are numbers, text, or dicts of the same form. Printed with one metric per line."""

    def __str__(self) -> str:
        return "\n".join(_lines(self, ""))


def _lines(metrics: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {round(value, 6) if isinstance(value, float) else value}"


def flattened(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested metrics as one level with names such as ``env_runners/episode_return_mean``."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


WINDOWED = ("returns", "lengths", "of_agents")


class EpisodeWindow:
    """The last episodes, over which returns and lengths are averaged.

    Args:
        size: number of episodes.
    """

    def __init__(self, size: int) -> None:
        self.returns: deque[float] = deque(maxlen=size)
        self.lengths: deque[int] = deque(maxlen=size)
        self.of_agents: deque[dict[str, tuple[str, float]]] = deque(maxlen=size)
        self.episodes = self.cut = self.env_steps = self.agent_steps = 0

    def add(self, stats: EpisodeStats) -> None:
        """Count the episodes of a report."""
        self.returns.extend(stats.returns)
        self.lengths.extend(stats.lengths)
        self.episodes += len(stats)
        self.cut += stats.cut
        self.env_steps += stats.env_steps
        self.agent_steps += stats.agent_steps
        self.of_agents.extend(stats.of_agents)

    def summary(self, stats: EpisodeStats) -> dict[str, Any]:
        """Means over the window, and counts of one report and of the whole run; without episodes the means are NaN."""
        returns, lengths = np.array(self.returns), np.array(self.lengths)
        some = len(returns) > 0
        return {
            "episode_return_mean": float(returns.mean()) if some else float("nan"),
            "episode_return_min": float(returns.min()) if some else float("nan"),
            "episode_return_max": float(returns.max()) if some else float("nan"),
            "episode_len_mean": float(lengths.mean()) if some else float("nan"),
            "num_episodes": len(stats),
            "num_episodes_cut": stats.cut,
            "num_episodes_lifetime": self.episodes,
            "num_episodes_cut_lifetime": self.cut,
            "num_env_steps_sampled": stats.env_steps,
            "num_env_steps_sampled_lifetime": self.env_steps,
            **self._of_several_agents(stats),
        }

    def _of_several_agents(self, stats: EpisodeStats) -> dict[str, Any]:
        """Means by agent and by policy, if there are several agents."""
        if not self.agent_steps:
            return {}
        by_agent: dict[str, list[float]] = {}
        by_policy: dict[str, list[float]] = {}
        for episode in self.of_agents:
            for agent, (policy, total) in episode.items():
                by_agent.setdefault(agent, []).append(total)
                by_policy.setdefault(policy, []).append(total)
        agents, policies = ({name: float(np.mean(each)) for name, each in by.items()} for by in (by_agent, by_policy))
        return {
            "agent_episode_returns_mean": agents, "module_episode_returns_mean": policies,
            "policy_reward_mean": dict(policies), "num_agent_steps_sampled": stats.agent_steps,
            "num_agent_steps_sampled_lifetime": self.agent_steps,
        }  # fmt: skip

    def get_state(self) -> dict[str, Any]:
        return {**vars(self), **{name: list(getattr(self, name)) for name in WINDOWED}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        size = self.returns.maxlen
        vars(self).update(state)
        for name in WINDOWED:
            setattr(self, name, deque(state[name], size))
