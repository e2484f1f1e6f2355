"""Several environments of several agents, each of which is made again if it breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlmesh.envs.environments.local_vector import close_broken
from rlmesh.envs.environments.step_checks import check_agents_step
from rlmesh.envs.multi_agent.env_process import EnvProcess
from rlmesh.envs.multi_agent.environment import MultiAgentEnv
from rlmesh.envs.multi_agent.pettingzoo_env import several_agents_env
from rlmesh.errors import UsageError

__all__ = ["MultiAgentVector"]


class MultiAgentVector:
    """Environments of a runner: it steps those of this process one after the other, those of others all at once.

    Args:
        make: makes environment ``index`` of the runner.
        size: number of environments.
        seeds: ``seeds(index, start)`` is the seed of the first reset of an environment; None: the environment's own.
        restart: False lets the error of an environment pass.

    Raises:
        UsageError: the creator's environments are not of several agents.
    """

    def __init__(
        self, make: Callable[[int], Any], size: int, seeds: Callable[[int, int], int] | None, *, restart: bool = True
    ) -> None:  # fmt: skip
        self._make, self._seeds, self._restart = make, seeds, restart
        self.envs: list[MultiAgentEnv] = [self._made(i) for i in range(size)]
        self.size = size
        self.starts, self._failures, self._begun = [0] * size, [0] * size, [False] * size
        self._checked = [False] * size

    def _made(self, i: int) -> MultiAgentEnv:
        return several_agents_env(self._make(i))

    def reset(self, i: int) -> tuple[Any, Any]:
        """Begin an episode; observations and infos by agent. A broken environment is made again first."""
        while True:
            seed = None
            if not self._begun[i]:
                self._begun[i] = True
                seed = self._seeds(i, self.starts[i]) if self._seeds is not None else None
            try:
                observations, infos = self.envs[i].reset(seed=seed)
                if not observations:
                    raise UsageError(f"environment {i}: reset returned no observation, so that no agent can act")
                return observations, infos
            except Exception as error:
                self._remake(i, error)

    def begin_steps(self, actions: Mapping[int, dict[Any, Any]]) -> None:
        """Let environments in other processes begin their steps.

        Args:
            actions: by environment, as `step` will get them.
        """
        for i, each in actions.items():
            env = self.envs[i]
            if isinstance(env, EnvProcess):
                with suppress(ChildProcessError):  # then the step raises it
                    env.begin_step(each)

    def step(self, i: int, actions: dict[Any, Any]) -> tuple[Any, Any, Any, Any, Any] | None:
        """The results of a step, dicts by agent; None if the environment broke, and was made again."""
        try:
            results = self.envs[i].step(actions)
            if not self._checked[i]:
                check_agents_step(results, self.envs[i])
                self._checked[i] = True
        except UsageError:
            raise  # an environment that is written wrongly does the same again
        except Exception as error:
            self._remake(i, error)
            return None
        self._failures[i] = 0
        found: tuple[Any, Any, Any, Any, Any] = results
        return found

    def _remake(self, i: int, error: Exception) -> None:
        self._failures[i] += 1
        close_broken(self.envs[i], i, error, failures=self._failures[i], restart=self._restart)
        self.starts[i] += 1
        self._begun[i] = False
        self.envs[i] = self._made(i)

    @property
    def begun(self) -> bool:
        """True if an environment was reset already."""
        return any(self._begun)

    def put(self, envs: list[MultiAgentEnv], starts: list[int]) -> None:
        """Take over environments whose episodes go on, and how often each was made again."""
        self.envs, self.starts, self._begun = envs, list(starts), [True] * self.size

    def begin_again(self, starts: list[int]) -> None:
        """Let the next resets take the seeds of other starts, as a restored run does."""
        self.starts = [*starts[: self.size], *[1] * (self.size - len(starts))]
        self._begun = [False] * self.size

    def close(self) -> None:
        for env in self.envs:
            env.close()
