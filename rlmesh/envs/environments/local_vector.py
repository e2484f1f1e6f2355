"""Several environments in one process, stepped one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmesh.envs.environments.actions import ActionRows
from rlmesh.envs.environments.features import SEQUENCE_LENGTH
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.envs.environments.step_checks import check_reset, check_step
from rlmesh.errors import UsageError

__all__ = ["LocalVector", "StepOutcome", "env_seed"]

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""Failures of a sub-environment without one good step in between, after which its error is raised."""
EMPTY_INFO: dict[str, Any] = {}
"""Shared by all steps without info, so that batches of them stay small."""


def env_seed(seed: int, runner: int, index: int, start: int) -> int:
    """The seed of one environment: a function of the run's seed, the runner, the place in it, and the restarts."""
    return int(np.random.SeedSequence([seed, runner, index, start]).generate_state(1)[0] >> 1)


@dataclass(slots=True)
class StepOutcome:
    """The results of a step of all environments. The arrays are reused by the next step.

    Attributes:
        rewards: ``[environments]``, float64.
        terminateds, truncateds: ``[environments]``, bool.
        valid: False where the row is no step: the environment was being reset, or it broke.
        ended: indices of environments whose episode ended with this step.
        final: the last observations of these episodes, ``[len(ended), …]``, in their order.
        cut: indices of environments that broke in this step and were restarted.
        infos: the info of each step, if they were asked for.
    """

    rewards: np.ndarray
    terminateds: np.ndarray
    truncateds: np.ndarray
    valid: np.ndarray
    ended: list[int] = field(default_factory=list)
    final: list[np.ndarray] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    infos: list[Any] | None = None

    def begin(self) -> None:
        """Clear the fields that a step fills in rarely."""
        self.valid[:] = True
        self.ended, self.final, self.cut = [], [], []

    @classmethod
    def of(cls, size: int, *, infos: bool) -> StepOutcome:
        return cls(
            np.zeros(size), np.zeros(size, bool), np.zeros(size, bool), np.ones(size, bool),
            infos=[EMPTY_INFO] * size if infos else None,
        )  # fmt: skip


class LocalVector:
    """Environments that are stepped in a loop, and reset in the step in which their episode ends.

    Observations are copied into the caller's array at once, so an environment may reuse its own. An environment whose
    ``step`` or ``reset`` raises is made again, with a seed of its own; its siblings go on. One that breaks the rules of
    Gymnasium's interface is not: a `UsageError` says how.

    Args:
        make: makes environment ``index`` of the runner.
        size: number of environments.
        seeds: ``seeds(index, start)`` is the seed of the first reset of an environment; None: the environment's own.
        restart: False lets the error of an environment pass.
        infos: collect infos.
        max_sequence_length: see `ObservationRows`.
    """

    resets_later = False
    """True if an ended episode's environment is reset by the next step, and not by the same one."""

    def __init__(
        self, make: Callable[[int], Any], size: int, seeds: Callable[[int, int], int] | None, *, restart: bool = True,
        infos: bool = False, first: Any = None, max_sequence_length: int = SEQUENCE_LENGTH,
    ) -> None:  # fmt: skip
        self._make, self._seeds, self._restart = make, seeds, restart
        self.envs = [first if i == 0 and first is not None else make(i) for i in range(size)]
        self.size = size
        self.action_space = self.envs[0].action_space
        self.rows = ObservationRows(self.envs[0].observation_space, max_sequence_length)
        self.actions = ActionRows(self.action_space)
        self.starts, self._failures, self._begun = [0] * size, [0] * size, [False] * size
        self._checked = [False] * size
        self.outcome = StepOutcome.of(size, infos=infos)
        for i, env in enumerate(self.envs):
            if env.observation_space != self.envs[0].observation_space or env.action_space != self.action_space:
                raise UsageError(f"environments 0 and {i} of one runner differ in their spaces")

    def reset(self, out: np.ndarray, running: np.ndarray) -> None:
        """Begin an episode where one is running; ``out[i]`` becomes the first observation of environment i.

        An environment that has just been reset is not reset again: its first observation stays in ``out``.

        Args:
            running: False for environments at the start of an episode; ``[environments]``.
        """
        for i in range(self.size):
            if not self._begun[i]:
                self._begun[i] = True
                self._begin(i, out, seeded=True)
            elif running[i]:
                self._begin(i, out)

    def step(self, actions: np.ndarray, out: np.ndarray) -> StepOutcome:
        """Step each environment with its action; ``out[i]`` becomes the next observation to act on.

        Args:
            actions: ``[environments, …]``.
        """
        outcome, write, infos = self.outcome, self.rows.write, self.outcome.infos
        outcome.begin()
        rewards, terminateds, truncateds = outcome.rewards, outcome.terminateds, outcome.truncateds
        each_action = self.actions.to_env(actions)
        for i, env in enumerate(self.envs):
            try:
                results = env.step(each_action[i])
                if not self._checked[i]:
                    check_step(results, env)
                    self._checked[i] = True
                observation, rewards[i], terminated, truncated, info = results
                write(out, i, observation)
            except UsageError:
                raise  # an environment that is written wrongly does the same again
            except Exception as error:
                self._replace(i, out, error)
                continue
            terminateds[i], truncateds[i] = terminated, truncated
            if infos is not None:
                infos[i] = deepcopy(info) if info else EMPTY_INFO
            if terminated or truncated:
                outcome.ended.append(i)
                outcome.final.append(out[i].copy())
                self._begin(i, out)
            self._failures[i] = 0
        return outcome

    def _begin(self, i: int, out: np.ndarray, *, seeded: bool = False) -> None:
        seed = self._seeds(i, self.starts[i]) if seeded and self._seeds is not None else None
        try:
            results = self.envs[i].reset(seed=seed)
            check_reset(results, self.envs[i])
            self.rows.write(out, i, results[0])
        except UsageError:
            raise
        except Exception as error:
            self._remake(i, out, error)

    def _replace(self, i: int, out: np.ndarray, error: Exception) -> None:
        outcome = self.outcome
        outcome.valid[i] = outcome.terminateds[i] = outcome.truncateds[i] = False
        outcome.rewards[i] = 0.0
        outcome.cut.append(i)
        if outcome.infos is not None:
            outcome.infos[i] = EMPTY_INFO
        self._remake(i, out, error)

    def _remake(self, i: int, out: np.ndarray, error: Exception) -> None:
        """Close a broken environment and make it again; raise its error if that happens too often."""
        self._failures[i] += 1
        close_broken(self.envs[i], i, error, failures=self._failures[i], restart=self._restart)
        self.starts[i] += 1
        self.envs[i] = self._make(i)
        self._begin(i, out, seeded=True)

    @property
    def begun(self) -> bool:
        """True if an environment was reset already."""
        return any(self._begun)

    def begin_again(self, starts: list[int]) -> None:
        """Let the next resets take the seeds of these starts, those of missing ones of the first restart."""
        self.starts = [*starts[: self.size], *[1] * (self.size - len(starts))]
        self._begun = [False] * self.size

    def put(self, envs: list[Any], starts: list[int]) -> None:
        """Take over environments whose episodes go on, and how often each was made again."""
        self.envs, self.starts, self._begun = envs, list(starts), [True] * self.size

    def close(self) -> None:
        for env in self.envs:
            env.close()


def close_broken(env: Any, i: int, error: Exception, *, failures: int, restart: bool) -> None:
    """Close an environment that broke, so that it can be made again.

    Args:
        i: its number in its runner.
        error: raised if it may not be made again, or broke too often without a good step between.
        failures: how often it broke in a row, this time included.
        restart: environments may be made again.
    """
    if not restart or failures > MAX_FAILURES_IN_A_ROW:
        error.add_note(
            f"environment {i} of this runner raised this"
            + (f" {failures} times without one good step between" if restart else "")
        )
        raise error
    logger.warning("environment %d broke and is made again; its episode is cut", i, exc_info=error)
    try:
        env.close()
    except Exception:
        logger.debug("the broken environment %d could not be closed", i, exc_info=True)
