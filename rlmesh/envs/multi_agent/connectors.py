"""`AgentConnectors`: the connectors of several agents and their policies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh.envs.connectors.connector import Connector, ConnectorPipeline
from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.errors import UsageError

__all__ = ["AgentConnectors"]

FIRST, NOT_FIRST = np.array([True]), np.array([False])


class AgentConnectors:
    """Connectors by policy: agents of a policy share the statistics, and each has a pipeline for its own observations.

    A pipeline belongs to an agent until the agent is done, then to a later agent of the same policy. All methods about
    statistics are those of `ConnectorPipeline`, with values by policy.

    Args:
        connectors: applied in this order to the observations of each agent; or a mapping by policy, in which policies
            without connectors may be left out.
        spaces: of observations, by policy.
        learn: False leaves statistics as they are.

    Raises:
        UsageError: a connector does not fit the space of a policy.
    """

    def __init__(
        self, connectors: Iterable[Connector] | Mapping[str, Iterable[Connector]], spaces: Mapping[str, Any], *,
        learn: bool,
    ) -> None:  # fmt: skip
        by_policy = connectors if isinstance(connectors, Mapping) else dict.fromkeys(spaces, tuple(connectors))
        if unknown := [name for name in by_policy if name not in spaces]:
            raise UsageError(f"connectors: there is no policy {unknown[0]!r}.{did_you_mean(str(unknown[0]), spaces)}")
        self._given = {name: tuple(by_policy.get(name, ())) for name in spaces}
        self._spaces, self._learn = dict(spaces), learn
        self.shared = {name: self._new(name) for name in spaces}
        """Pipelines that have the merged statistics, and see no observation of an episode."""
        self._pipelines: dict[str, list[ConnectorPipeline]] = {name: [] for name in spaces}

    def __bool__(self) -> bool:
        return any(self._given.values())

    def has(self, policy_id: str) -> bool:
        """True if a policy has connectors."""
        return bool(self._given[policy_id])

    def _new(self, policy_id: str) -> ConnectorPipeline:
        try:
            return ConnectorPipeline(self._given[policy_id], self._spaces[policy_id], 1, learn=self._learn)
        except UsageError as error:
            raise UsageError(f"policy {policy_id!r}: {error}") from None

    def space(self, policy_id: str) -> Any:
        """The space of observations that a policy gets."""
        return self.shared[policy_id].space

    def free_place(self, policy_id: str, taken: Collection[int]) -> int:
        """The number of a pipeline that no agent has; it is made if there is none.

        Args:
            taken: numbers of the pipelines of this policy that agents have.
        """
        pipelines = self._pipelines[policy_id]
        for place in range(len(pipelines)):
            if place not in taken:
                return place
        pipelines.append(self._new(policy_id))
        pipelines[-1].set_shared_state(self.shared[policy_id].shared_state())
        return len(pipelines) - 1

    def observe(self, policy_id: str, place: int, row: np.ndarray, *, first: bool) -> np.ndarray:
        """An observation ``[1, …]`` of an agent as its policy gets it, ``[1, …]``."""
        return self._pipelines[policy_id][place].observe(row, FIRST if first else NOT_FIRST)

    def last(self, policy_id: str, place: int, row: np.ndarray) -> np.ndarray:
        """The last observation ``[1, …]`` of an agent as its policy would get it, ``[1, …]``."""
        return self._pipelines[policy_id][place].last(row[0], 0)[None]

    def rewards(self, policy_id: str, place: int, rewards: np.ndarray) -> np.ndarray:
        """The rewards ``[time]`` of an agent from which its policy learns."""
        given = rewards[None]
        changed = self._pipelines[policy_id][place].rewards(given)
        return rewards if changed is given else changed[0]

    def take_delta(self) -> dict[str, list[Any]]:
        """The statistics of all pipelines since the last call, by policy."""
        return {name: [each.take_delta() for each in pipelines] for name, pipelines in self._pipelines.items()}

    def merge(self, deltas: Sequence[Mapping[str, list[Any]]]) -> None:
        """Add the deltas of several runners, in their order."""
        for name, shared in self.shared.items():
            shared.merge([each for delta in deltas for each in delta[name]])
        self._share()

    def _share(self) -> None:
        for name, pipelines in self._pipelines.items():
            for each in pipelines:
                each.set_shared_state(self.shared[name].shared_state())

    def shared_state(self) -> dict[str, list[Any]]:
        """The states that are equal on all runners, by policy."""
        return {name: shared.shared_state() for name, shared in self.shared.items()}

    def set_shared_state(self, states: Mapping[str, Sequence[Any]]) -> None:
        """Take over the states of another runner."""
        for name, state in dict(states).items():
            self.shared[name].set_shared_state(state)
        self._share()

    def state(self) -> dict[str, Any]:
        """Everything, for the checkpoint of this runner."""
        own = {name: [each.state() for each in pipelines] for name, pipelines in self._pipelines.items()}
        return {"shared": self.shared_state(), "pipelines": own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `state`."""
        for name, states in state["pipelines"].items():
            self._pipelines[name] = [self._new(name) for _ in states]
            for pipeline, each in zip(self._pipelines[name], states, strict=True):
                pipeline.set_state(each)
        for name, shared in state["shared"].items():
            self.shared[name].set_shared_state(shared)
