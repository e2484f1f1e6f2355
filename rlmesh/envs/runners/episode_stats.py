"""Statistics of the episodes of a runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["EpisodeStats"]


@dataclass
class EpisodeStats:
    """The episodes that ended since the last report; each is reported once.

    Attributes:
        returns: sums of rewards, in the order of the ends.
        lengths: numbers of steps.
        cut: number of episodes that ended because their environment broke; they are in no other list.
        env_steps: steps of environments.
        agent_steps: steps of agents, where there are several; otherwise 0.
        of_agents: by agent, its policy and the sum of its rewards, for each episode of ``returns``; empty if there is
            one agent.
    """

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    env_steps: int = 0
    agent_steps: int = 0
    of_agents: list[dict[str, tuple[str, float]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.returns)

    @classmethod
    def interleaved(cls, parts: Sequence[EpisodeStats]) -> EpisodeStats:
        """The statistics of runners that sampled at the same time, their episodes spread evenly over each other.

        Without that, the last episodes, over which means are taken, would be those of the last runner.
        """
        total = cls(
            cut=sum(part.cut for part in parts), env_steps=sum(part.env_steps for part in parts),
            agent_steps=sum(part.agent_steps for part in parts),
        )  # fmt: skip
        places = [((i + 0.5) / len(part), number, i) for number, part in enumerate(parts) for i in range(len(part))]
        for _, number, i in sorted(places):
            total.returns.append(parts[number].returns[i])
            total.lengths.append(parts[number].lengths[i])
            total.of_agents += parts[number].of_agents[i : i + 1]
        return total

    @classmethod
    def merged(cls, parts: Iterable[EpisodeStats]) -> EpisodeStats:
        """The statistics of several spans of time, in their order."""
        total = cls()
        for part in parts:
            total.returns += part.returns
            total.lengths += part.lengths
            total.cut += part.cut
            total.env_steps += part.env_steps
            total.agent_steps += part.agent_steps
            total.of_agents += part.of_agents
        return total
