"""Episodes under way survive the death of a remote runner: each batch brings what is needed to go on with them."""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

__all__ = ["EpisodeKeeper", "KeptEpisodes", "go_on"]

logger = logging.getLogger(__name__)

SHARE, FREE_S = 0.05, 0.05
"""Pickling may take this part of the time of sampling, and these seconds at the start."""
MOST_BYTES = 4 << 20
"""Of a runner with its environments; larger ones are not kept."""


class EpisodeKeeper:
    """Pickles a runner after its fragments, as long as that is cheap.

    Args:
        runner: an `EnvRunner`, or a `MultiAgentEnvRunner`.
    """

    def __init__(self, runner: Any) -> None:
        from rlmesh.envs.environments.pickling import EnvironmentPickler

        self._runner, self._gave_up = runner, False
        self._pickler = EnvironmentPickler(MOST_BYTES)
        self._sampled_s = self._pickled_s = 0.0

    def stop(self) -> None:
        """Keep nothing from now on."""
        self._gave_up = True

    def after(self, sampled_s: float) -> bytes | None:
        """The state of the runner, which `go_on` takes over; None if there is none, or if it is too dear.

        Args:
            sampled_s: seconds that the last fragment took.
        """
        self._sampled_s += sampled_s
        if self._gave_up or self._pickled_s > SHARE * self._sampled_s + FREE_S:
            return None
        began = time.thread_time()  # the time that pickling takes, and not that in which others have the core
        try:
            state = self._runner.get_state(pickle_with=self._pickler)
        except Exception as error:
            logger.info("episodes under way are lost if this runner dies: %s", error)
            self._gave_up = True
            return None
        found = pickle.dumps(state) if "envs" in state else None
        self._pickled_s += time.thread_time() - began
        return found


def go_on(runner: Any, kept: bytes | None, delta_taken: bool) -> None:
    """Let a new runner go on with the episodes of a dead one; it begins new ones if that is not possible.

    Args:
        kept: what `EpisodeKeeper.after` returned; None: new episodes.
        delta_taken: the statistics of connectors in it were merged already.
    """
    if kept is None:
        return
    try:
        runner.set_state(pickle.loads(kept))
    except Exception:
        logger.warning("the episodes of a dead runner cannot go on, and new ones begin", exc_info=True)
        runner.begin_episodes()
        return
    if delta_taken:
        runner.connectors.take_delta()


class KeptEpisodes:
    """The states of remote runners after the last batch of each, at the group of the runners."""

    def __init__(self, number: int) -> None:
        self._states: list[bytes | None] = [None] * number
        self._delta_taken = [False] * number

    def keep(self, index: int, state: bytes | None) -> None:
        """Replace the state of a runner; called with each batch, in their order."""
        self._states[index], self._delta_taken[index] = state, False

    def forget(self) -> None:
        """Forget all states: runners that come back begin new episodes."""
        self._states = [None] * len(self._states)

    def note_delta_taken(self, index: int) -> None:
        """Note that the statistics of connectors in the state of a runner were merged."""
        self._delta_taken[index] = True

    def of(self, index: int) -> tuple[bytes | None, bool]:
        """The arguments of `go_on` for a runner."""
        return self._states[index], self._delta_taken[index]
