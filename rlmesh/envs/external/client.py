"""`ExternalEnvClient`: the side of a simulator outside of the job."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any, Self

from rlmesh import MemberHandle, RoleGroup, Runtime
from rlmesh.envs.external.spec import EpisodeLost
from rlmesh.errors import CallCancelled, PeerLost, UsageError

__all__ = ["ExternalEnvClient", "PolicyClient"]

ROLE = "ENV_RUNNER"
AS_LONG_AS_IT_TAKES_S = 10 * 365 * 86400.0


class ExternalEnvClient:
    """Connects a simulator to the runners of an algorithm whose environment is an `ExternalEnv`::

        with ExternalEnvClient(address, key_file) as client:
            episode = client.start_episode()
            while not done:
                action = client.get_action(episode, observation)
                observation, reward, done, *_ = simulator.step(action)
                client.log_returns(episode, reward)
            client.end_episode(episode, observation)

    The names are those of RLlib's ``PolicyClient``, and actions are computed by the runner. Whoever holds the job's key
    can connect, nobody else. The episodes of a client that dies are cut.

    Args:
        address, key_file: of the job, as ``algorithm.env_runner_group.connection()`` and ``rlmesh ps JOB`` show them.
        key: the key itself, in place of a file.
        inference_mode: ``"remote"``; weights are not sent to clients.
        timeout_s: longest wait for an answer, also for an action while the algorithm learns, and for the job at first.

    Raises:
        UsageError: the key file cannot be used, or the algorithm has no external environment.
        AuthenticationFailed: the key is another job's.
        PeerLost: no job answers.
    """

    def __init__(
        self, address: str, key_file: str | Path | None = None, *, key: bytes | None = None,
        inference_mode: str = "remote", timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        if inference_mode != "remote":
            raise UsageError(f"ExternalEnvClient(inference_mode={inference_mode!r}): 'remote' is the only one")
        self.timeout_s = timeout_s
        self._name = f"simulator-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._joining = Runtime.join(address, key_file, key=key, name=self._name, timeout_s=min(timeout_s, 60.0))
        runtime = self._joining.__enter__()
        self._member: MemberHandle[Any] | None = None
        self._stream: Any = None
        self._open = True
        try:
            self._runners = RoleGroup[Any](ROLE, runtime=runtime)
            self._attend()
        except BaseException:
            self.close()
            raise

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Begin an episode.

        Args:
            episode_id: its name among the episodes of this client; None: a new one.
            training_enabled: False: actions are computed, and nothing is learned from the episode.

        Returns:
            The name.
        """
        name = uuid.uuid4().hex if episode_id is None else episode_id
        if self._member is None:
            self._attend()
        try:
            self._call("start_episode", name, training_enabled)
        except EpisodeLost:  # the runner died since the last call
            self._attend()
            self._call("start_episode", name, training_enabled)
        return name

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """The action for an observation; finishes the step before.

        Raises:
            EpisodeLost: the runner of the episode died; begin a new one.
            CallTimeout: there was no answer in time, for instance since nobody trains.
        """
        return self._call("get_action", episode_id, observation)

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Tell an action that the simulator chose itself; finishes the step before."""
        self._call("log_action", episode_id, observation, action)

    def log_returns(self, episode_id: str, reward: float, info: Any = None) -> None:
        """Add a reward to the step of the last action. The info is not used."""
        self._call("log_returns", episode_id, float(reward))

    def end_episode(self, episode_id: str, observation: Any, *, truncated: bool = False) -> None:
        """End an episode.

        Args:
            observation: the last one.
            truncated: the episode would go on, and its last observation is valued.
        """
        self._call("end_episode", episode_id, observation, truncated)

    def close(self) -> None:
        """Leave the job; episodes that go on are cut."""
        if not self._open:
            return
        self._open = False
        if self._stream is not None:
            self._stream.close()
        self._joining.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, *args: Any) -> Any:
        if not self._open:
            raise UsageError(f"{method}: the client is closed")
        if self._member is None:
            raise EpisodeLost("the runner of this episode died: begin a new episode")
        try:
            return self._member.options(timeout_s=self.timeout_s).call("external", self._name, method, *args).result()
        except (PeerLost, CallCancelled) as error:
            self._member = None
            raise EpisodeLost(f"the runner of this episode died, or the job ended: {error}") from error

    def _attend(self) -> None:
        """Connect to the runner with the fewest clients."""
        if self._stream is not None:
            self._stream.close()
        until = time.monotonic() + self.timeout_s
        while True:
            left_s = max(1.0, until - time.monotonic())
            group = self._runners.options(timeout_s=left_s, idempotent=True)
            try:
                counts = group.call("external_clients").result()
                rank = min(range(len(counts)), key=counts.__getitem__)
                self._stream = self._runners[rank].options(timeout_s=AS_LONG_AS_IT_TAKES_S).stream("attend", self._name)
                next(self._stream)
            except PeerLost:  # the runner restarts
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                self._member = self._runners[rank]
                return


PolicyClient = ExternalEnvClient
