"""`ExternalEnv`: the spaces of environments that are not made here, but connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmesh.envs.environments.actions import ActionRows
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.errors import RLMeshError, UsageError

__all__ = ["EpisodeLost", "ExternalEnv", "ExternalVector", "external_problems"]


class EpisodeLost(RLMeshError):
    """The job does not have an episode any more: its runner died, or the connection broke; begin a new episode."""

    code = "RM821"


class ExternalEnv:
    """An environment outside of the job: ``environment(ExternalEnv(observation_space, action_space))``.

    Simulators connect to a remote runner with `ExternalEnvClient`; as many as you like, also from other programs.

    Args:
        observation_space, action_space: Gymnasium's spaces.
        wait_for_learner: a client that asks for an action while the algorithm learns waits for the new weights, so that
            batches of on-policy algorithms are of one policy, except for the step that each client is in. False
            answers at once, with the weights of the moment.

    Raises:
        UsageError: the spaces are not supported.
    """

    def __init__(self, observation_space: Any, action_space: Any, *, wait_for_learner: bool = True) -> None:
        import gymnasium

        for name, space in (("observation_space", observation_space), ("action_space", action_space)):
            if not isinstance(space, gymnasium.Space):
                raise UsageError(f"ExternalEnv({name}=…): a space of Gymnasium, not {space!r}")
        ObservationRows(observation_space)
        if not ActionRows(action_space).is_plain:
            raise UsageError(f"ExternalEnv: actions of clients are of Box, Discrete, …, not of {action_space}")
        self.observation_space, self.action_space = observation_space, action_space
        self.wait_for_learner = wait_for_learner

    def __call__(self, context: Any) -> Any:
        raise UsageError("an external environment cannot be made here: it connects with ExternalEnvClient")

    def __repr__(self) -> str:
        return f"ExternalEnv({self.observation_space}, {self.action_space})"


class ExternalVector:
    """The spaces of an `ExternalEnv`, in place of a vector of environments."""

    resets_later = False
    begun = True
    """The simulators have begun before the runner knows of them."""

    def __init__(self, spec: ExternalEnv) -> None:
        self.rows, self.action_space = ObservationRows(spec.observation_space), spec.action_space
        self.actions = ActionRows(spec.action_space)
        self.size, self.starts = 1, [0]
        self.envs: list[Any] = []

    def begin_again(self, start: int) -> None:
        """Leave the simulators as they are: they choose their own seeds."""

    def close(self) -> None:
        """Leave the simulators as they are: they belong to other programs."""


def external_problems(values: Mapping[str, Any]) -> list[str]:
    """The faults of an algorithm's settings, if its environment is external."""
    if not isinstance(values["env"], ExternalEnv):
        return []
    found = []
    if values["num_env_runners"] == 0:
        found.append("num_env_runners=0: external environments connect to a job; set 1 or more")
    evaluation = values["evaluation_config"]
    if values["evaluation_interval"] is not None and not (isinstance(evaluation, Mapping) and evaluation.get("env")):
        found.append(
            "evaluation_interval: an external environment cannot be reset for an evaluation; name another environment "
            'by evaluation_config={"env": …}, or leave the interval out'
        )
    return found
