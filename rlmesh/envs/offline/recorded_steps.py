"""`RecordedSteps`: the steps of recorded episodes, with what returns need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.environments.features import whole_numbers
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.environments.observations import ObservationRows

__all__ = ["RecordedPart", "RecordedSteps"]


class RecordedPart:
    """Consecutive steps of one episode, up to its end or to the end of what was recorded.

    Args:
        source: where it comes from, for errors.
        observations: ``[steps + 1, …]``, the last one that after the last step; or ``[steps, …]`` if that is unknown.
        actions: ``[steps, …]``.
        rewards: ``[steps]``.
        terminated: the last step ended the episode for good.

    Raises:
        UsageError: the lengths do not fit each other.
    """

    def __init__(
        self, source: str, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray, terminated: bool
    ) -> None:
        self.source, self.terminated = source, bool(terminated)
        self.observations, self.actions = observations, actions
        self.rewards = np.asarray(rewards, np.float32)
        steps = len(self.rewards)
        if len(actions) != steps or len(observations) not in (steps, steps + 1):
            raise UsageError(
                f"{source}: {len(observations)} observations, {len(actions)} actions and {steps} rewards are no episode"
            )

    def __len__(self) -> int:
        return len(self.rewards)


class RecordedSteps:
    """Steps of many episodes as one batch, and their discounted returns.

    Args:
        parts: episodes, or parts of them.
        rows: the form of observations that the policy takes.
        action_space: of the environment.

    Attributes:
        batch: columns ``obs``, ``actions`` and ``rewards``.

    Raises:
        UsageError: there are no steps, or they do not fit the spaces of the environment.
    """

    def __init__(self, parts: Sequence[RecordedPart], rows: ObservationRows, action_space: Any) -> None:
        parts = [part for part in parts if len(part)]
        if not parts:
            raise UsageError("input_: the sources have no steps")
        for part in parts:
            _require_fit(part, rows, action_space)
        self.parts = parts
        self.batch = SampleBatch({
            columns.OBS: np.concatenate([part.observations[: len(part)] for part in parts]).astype(rows.dtype),
            columns.ACTIONS: np.concatenate([part.actions for part in parts]).astype(action_space.dtype),
            columns.REWARDS: np.concatenate([part.rewards for part in parts]),
        })  # fmt: skip
        self._rows = rows
        self._sums: tuple[float, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.batch)

    def last_observations(self) -> np.ndarray:
        """The observation after the last step of each part that does not end by termination, ``[parts, …]``.

        Raises:
            UsageError: a part has none, so that the rest of its return is unknown.
        """
        open_ = [part for part in self.parts if not part.terminated]
        for part in open_:
            if len(part.observations) == len(part):
                raise UsageError(
                    f"{part.source}: an episode is not terminated, and the observation after its last step is unknown, "
                    "so its returns are too; MARWIL needs the column new_obs, BC does not"
                )
        result = self._rows.empty(len(open_))
        for i, part in enumerate(open_):
            result[i] = part.observations[-1]
        return result

    def returns(self, gamma: float, last_values: np.ndarray) -> np.ndarray:
        """The discounted rewards of each step until the end of its part, and the value after it, ``[rows]``, float32.

        Args:
            gamma: discount.
            last_values: of the observations of `last_observations`.
        """
        if self._sums is None or self._sums[0] != gamma:
            self._sums = (gamma, *self._discounted(gamma))
        _, sums, discounts = self._sums
        values = iter(last_values)
        after = np.repeat([0.0 if part.terminated else next(values) for part in self.parts], [*map(len, self.parts)])
        result: np.ndarray = (sums + discounts * after).astype(np.float32)
        return result

    def _discounted(self, gamma: float) -> tuple[np.ndarray, np.ndarray]:
        """Discounted rewards until the end of the part, and the discount of what comes after it, ``[rows]``."""
        sums, discounts, start = np.empty(len(self)), np.empty(len(self)), 0
        for part in self.parts:
            ahead, end = 0.0, start + len(part)
            for i, reward in enumerate(part.rewards[::-1].tolist(), 1):
                ahead = reward + gamma * ahead
                sums[end - i] = ahead
            discounts[start:end] = gamma ** np.arange(len(part), 0, -1)
            start = end
        return sums, discounts


def _require_fit(part: RecordedPart, rows: ObservationRows, action_space: Any) -> None:
    """Refuse observations and actions that are not of the environment's spaces."""
    for name, array, shape, dtype in (
        ("observations", part.observations, rows.shape, rows.dtype),
        ("actions", part.actions, tuple(action_space.shape or ()), np.dtype(action_space.dtype)),
    ):
        if array.shape[1:] != shape:
            raise UsageError(f"{part.source}: {name} have shape {array.shape[1:]}, those of the environment {shape}")
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise UsageError(f"{part.source}: {name} are {array.dtype}, those of the environment {dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UsageError(f"{part.source}: some {name} are NaN or infinite")
        if array.dtype != dtype and whole_numbers(array, dtype) is None:
            raise UsageError(f"{part.source}: some {name} do not fit {dtype}, the type of their space")
    if not np.isfinite(part.rewards).all():
        raise UsageError(f"{part.source}: some rewards are NaN or infinite")
    start, count = getattr(action_space, "start", 0), getattr(action_space, "n", getattr(action_space, "nvec", None))
    if count is not None and ((part.actions < start) | (part.actions >= start + count)).any():
        raise UsageError(f"{part.source}: some actions are not in {action_space}")
