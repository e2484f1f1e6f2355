"""Gymnasium's own vector environments, in all three autoreset modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlmesh.envs.environments.actions import ActionRows
from rlmesh.envs.environments.features import whole_numbers
from rlmesh.envs.environments.local_vector import EMPTY_INFO, StepOutcome
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.errors import UsageError

__all__ = ["GymVector"]

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"


class GymVector:
    """A ``gymnasium.vector.VectorEnv`` behind the methods of `LocalVector`.

    ============  ==============================================================================================
    ``NextStep``  the step after the end of an episode resets: it is no step, and its row is dropped
    ``SameStep``  the last step returns the next episode's first observation; the final one is in the infos
    ``Disabled``  this class resets the environments whose episodes ended, by their mask
    ============  ==============================================================================================

    Args:
        env: the vector environment.
        seeds: ``seeds(start)`` is the seed of a first reset, or a list with one seed per environment; None: the
            environment's own.
        infos: collect infos.

    Raises:
        UsageError: the environment names no autoreset mode, or its spaces are not supported.
    """

    def __init__(self, env: Any, seeds: Callable[[int], int | list[int]] | None = None, *, infos: bool = False) -> None:
        mode = env.metadata.get("autoreset_mode")
        self.mode = getattr(mode, "value", mode)
        if self.mode not in (NEXT_STEP, SAME_STEP, DISABLED):
            raise UsageError(
                f"the vector environment {env} has metadata['autoreset_mode'] = {mode!r}; it must name one of "
                "gymnasium.vector.AutoresetMode, since the mode decides which observation is an episode's last"
            )
        self.env, self._seeds, self.resets_later = env, seeds, self.mode == NEXT_STEP
        self.starts, self._begun = [0], False
        self.size = int(env.num_envs)
        self.action_space = env.single_action_space
        self.rows = ObservationRows(env.single_observation_space)
        self.actions = ActionRows(self.action_space)
        if self.rows.flattens or not self.actions.is_plain:
            raise UsageError(
                "vector environments have plain observations and actions here, not "
                f"{env.single_observation_space} and {self.action_space}; a creator of one environment may have any"
            )
        self.outcome = StepOutcome.of(self.size, infos=infos)
        self._resetting = np.zeros(self.size, bool)

    def reset(self, out: np.ndarray, running: np.ndarray) -> None:
        """Begin an episode in each environment; seeds are those of the first time after each start only."""
        seed = self._seeds(self.starts[0]) if self._seeds is not None and not self._begun else None
        self._begun = True
        observations, _ = self.env.reset(seed=seed)
        self._copy(out, observations)
        self._resetting[:] = False

    @property
    def begun(self) -> bool:
        """True if the environments were reset already."""
        return self._begun

    def begin_again(self, start: int) -> None:
        """Let the next reset take the seeds of this start, as a restored run does."""
        self.starts, self._begun = [start], False

    def step(self, actions: np.ndarray, out: np.ndarray) -> StepOutcome:
        """Step all environments; ``out`` becomes the observations to act on. The row of a reset is not valid."""
        outcome = self.outcome
        outcome.begin()
        observations, rewards, terminateds, truncateds, infos = self.env.step(actions.astype(self.actions.dtype))
        self._copy(out, observations)
        outcome.rewards[:], outcome.terminateds[:], outcome.truncateds[:] = rewards, terminateds, truncateds
        done = outcome.terminateds | outcome.truncateds
        if outcome.infos is not None:
            outcome.infos[:] = _rows_of(infos, self.size)
            if self.mode == SAME_STEP and done.any():  # the others at these places are of the reset
                of_ended = _rows_of(infos.get("final_info", {}), self.size)
                for i in np.flatnonzero(done):
                    outcome.infos[i] = of_ended[i]
        if self.mode == NEXT_STEP:
            np.logical_not(self._resetting, out=outcome.valid)
            outcome.rewards[self._resetting] = 0.0
            outcome.terminateds &= outcome.valid
            outcome.truncateds &= outcome.valid
            self._resetting = done & outcome.valid
        if done.any():
            ended = np.flatnonzero(done & outcome.valid)
            outcome.ended = ended.tolist()
            outcome.final = self._final(ended, out, infos)
            if self.mode == DISABLED:
                observations, _ = self.env.reset(options={"reset_mask": done})
                self._copy(out, observations)
        return outcome

    def _copy(self, out: np.ndarray, observations: Any) -> None:
        observations = np.asarray(observations)
        if observations.shape != out.shape:
            raise UsageError(f"observations have shape {observations.shape}, their space {out.shape}")
        np.copyto(out, self._fitting(observations), casting="same_kind")

    def _fitting(self, observations: np.ndarray) -> np.ndarray:
        """Observations whose numbers fit the type of their space.

        Raises:
            UsageError: some do not; NumPy would wrap them.
        """
        dtype = self.rows.dtype
        if observations.dtype == dtype:
            return observations
        found = whole_numbers(observations, dtype) if np.can_cast(observations.dtype, dtype, "same_kind") else None
        if found is None:
            raise UsageError(
                f"observations of {observations.dtype} have numbers that do not fit {dtype}, the type of their space: "
                "the environment returns something that its observation_space does not contain"
            )
        return found

    def _final(self, ended: np.ndarray, out: np.ndarray, infos: dict[str, Any]) -> list[np.ndarray]:
        if self.mode != SAME_STEP:
            return [out[i].copy() for i in ended]
        final = infos.get("final_obs", infos.get("final_observation"))
        missing = [int(i) for i in ended if final is None or final[i] is None]
        if missing:
            raise UsageError(
                f"the vector environment resets in the same step, and has no infos['final_obs'] for environments "
                f"{missing}: without the final observation, truncated episodes cannot be valued"
            )
        assert final is not None
        own: Any = getattr(self.env.unwrapped, "_env_obs", None)  # Gymnasium's SyncVectorEnv keeps them there
        for i in ended if own is not None else ():
            if isinstance(final[i], np.ndarray) and np.shares_memory(final[i], own[i]):
                raise UsageError(
                    f"environment {i} returns its observations in one array again and again, and resets in the same "
                    "step: its final observation is overwritten by the next episode's first one. Return copies, or "
                    "take autoreset_mode NEXT_STEP"
                )
        return [np.array(self._fitting(np.asarray(final[i])), self.rows.dtype) for i in ended]

    def close(self) -> None:
        self.env.close()


def _rows_of(infos: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """The infos of each environment, of Gymnasium's dict of arrays in which ``_key`` says whose values are there."""
    rows: list[dict[str, Any]] = [EMPTY_INFO] * size
    for key, values in infos.items():
        if key.startswith("_") or key in ("final_obs", "final_info"):
            continue
        there = infos.get(f"_{key}")
        for i in range(size) if there is None else np.flatnonzero(there):
            if rows[i] is EMPTY_INFO:
                rows[i] = {}
            rows[i][key] = values[i] if not isinstance(values, dict) else _rows_of(values, size)[i]
    return rows
