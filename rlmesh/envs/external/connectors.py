"""`EpisodeConnectors`: the connectors of a runner whose episodes are played by clients."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlmesh.envs.connectors.connector import Connector, ConnectorPipeline

__all__ = ["EpisodeConnectors"]


class EpisodeConnectors(ConnectorPipeline):
    """A pipeline for each episode that goes on; all of them share the statistics, which are those of this object.

    A pipeline belongs to an episode until it ends, then to a later one. Clients and the sampling runner call from
    threads of their own. What `take_delta` returns is for `merge` of another object of this class.

    Args:
        connectors, space, learn: as of `ConnectorPipeline`.
        lock: held by callers that use the pipelines of episodes.
    """

    def __init__(self, connectors: Iterable[Connector], space: Any, *, learn: bool, lock: threading.Condition) -> None:
        self._given, self._raw_space, self._lock = tuple(connectors), space, lock
        super().__init__(self._given, space, 1, learn=learn)
        self._pipelines: list[ConnectorPipeline] = []
        self._free: list[ConnectorPipeline] = []

    def _new(self) -> ConnectorPipeline:
        self._pipelines.append(ConnectorPipeline(self._given, self._raw_space, 1, learn=self.learn))
        return self._pipelines[-1]

    def begin(self, *, learn: bool) -> ConnectorPipeline:
        """The pipeline of an episode that begins.

        Args:
            learn: False leaves statistics as they are.
        """
        if self._free:
            pipeline = self._free.pop()
        else:
            pipeline = self._new()
            pipeline.set_shared_state(self.shared_state())
        pipeline.learn = self.learn and learn
        return pipeline

    def end(self, pipeline: ConnectorPipeline) -> None:
        """Give back the pipeline of an episode that has ended."""
        self._free.append(pipeline)

    def take_delta(self) -> list[Any]:
        """The statistics of all episodes since the last call."""
        with self._lock:
            return [each.take_delta() for each in self._pipelines]

    def merge(self, deltas: Sequence[Sequence[Any]]) -> None:
        with self._lock:
            super().merge([each for delta in deltas for each in delta])
            self._share()

    def set_shared_state(self, states: Sequence[Any]) -> None:
        with self._lock:
            super().set_shared_state(states)
            self._share()

    def _share(self) -> None:
        for each in self._pipelines:
            each.set_shared_state(self.shared_state())

    def state(self) -> Mapping[str, Any]:
        """The shared statistics, and those of pipelines that were not merged; the episodes are not restored."""
        with self._lock:
            return {"shared": self.shared_state(), "pipelines": [each.state() for each in self._pipelines]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            for each in state["pipelines"]:
                pipeline = self._new()
                pipeline.set_state(each)
                self._free.append(pipeline)
            self.set_shared_state(state["shared"])
