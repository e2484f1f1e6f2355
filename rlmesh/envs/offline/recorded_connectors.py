"""Recorded steps as a policy behind connectors gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.envs.offline.recorded_steps import RecordedPart, RecordedSteps

if TYPE_CHECKING:
    from rlmesh.envs.connectors.connector import Connector, ConnectorPipeline

__all__ = ["through_connectors"]


def through_connectors(
    data: RecordedSteps, pipeline: ConnectorPipeline, action_space: Any, *, learn: bool
) -> RecordedSteps:
    """The steps with the observations and rewards that connectors make of them.

    A connector gets the recorded episodes one after the other. A part that begins within its episode counts as its
    beginning. What a connector learns, such as a mean and a variance, it learns from the observations of all steps,
    before it changes the first of them; so all steps are changed alike.

    Args:
        data: the steps as the environment gave them.
        pipeline: the connectors, for one environment.
        action_space: of the environment.
        learn: False leaves what the connectors have learnt as it is.
    """
    dtype = data.batch["obs"].dtype
    parts = [
        RecordedPart(each.source, each.observations.astype(dtype), each.actions, each.rewards, each.terminated)
        for each in data.parts
    ]
    for connector in pipeline.connectors:
        if learn:
            for part in parts:
                connector.episode(part.observations[: len(part)], learn=True)
            if (delta := connector.take_delta()) is not None:
                connector.merge([delta])
        parts = [_through(part, connector) for part in parts]
    return RecordedSteps(parts, ObservationRows(pipeline.space), action_space)


def _through(part: RecordedPart, connector: Connector) -> RecordedPart:
    observations = connector.episode(part.observations[: len(part)], learn=False)
    if len(part.observations) > len(part):
        observations = np.concatenate([observations, connector.last(part.observations[-1], 0)[None]])
    rewards = connector.clip_rewards(part.rewards[None])[0]
    return RecordedPart(part.source, observations, part.actions, rewards, part.terminated)
