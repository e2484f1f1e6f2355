"""`ExternalEnvClient`: the side of a simulator outside of the job."""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any, Self

from rlmesh import MemberHandle, RoleGroup, Runtime
from rlmesh.envs.external.spec import EpisodeLost
from rlmesh.errors import CallCancelled, CallTimeout, PeerLost, UsageError

__all__ = ["ExternalEnvClient", "PolicyClient"]

ROLE = "ENV_RUNNER"
ANSWER_S = 2.0
"""Wait for the runners to tell how many clients they have; the slower ones are left out."""
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
    can connect, nobody else; the key also lets its holder run code in the job, so give it to programs that you trust
    only. The episodes of a client that dies are cut.

    After a `CallTimeout` of a request for an action, repeat it: the runner counts one step, whether the first call
    reached it or not. Or tell by `log_action`, with the same observation, what the simulator did without an answer.

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
        self._turns: dict[str, int] = {}
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
        self._turns[name] = 0
        return name

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """The action for an observation; finishes the step before.

        Raises:
            EpisodeLost: the runner of the episode died; begin a new one.
            CallTimeout: there was no answer in time, for instance since nobody trains; the call can be repeated.
            UsageError: a call without an answer was repeated with another observation.
        """
        return self._ask("get_action", episode_id, observation)

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Tell an action that the simulator chose itself; finishes the step before."""
        self._ask("log_action", episode_id, observation, action)

    def log_returns(self, episode_id: str, reward: float, info: Any = None) -> None:
        """Add a reward to the step of the last action. The info is not used."""
        self._call("log_returns", episode_id, self._next(episode_id), float(reward))

    def end_episode(self, episode_id: str, observation: Any, *, truncated: bool = False) -> None:
        """End an episode.

        Args:
            observation: the last one.
            truncated: the episode would go on, and its last observation is valued. So it is after a request for an
                action that had no answer.
        """
        self._call("end_episode", episode_id, self._next(episode_id), observation, truncated)
        self._turns.pop(episode_id, None)

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

    def _next(self, episode_id: str) -> int:
        """The number of the next request for an action; one without an answer keeps its number."""
        return self._turns.get(episode_id, 0) + 1

    def _ask(self, method: str, episode_id: str, *args: Any) -> Any:
        turn = self._next(episode_id)
        answer = self._call(method, episode_id, turn, *args)
        self._turns[episode_id] = turn
        return answer

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
        """Connect to the runner with the fewest clients among those that answer."""
        if self._stream is not None:
            self._stream.close()
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                rank = self._free_runner(until)
                self._stream = self._runners[rank].options(timeout_s=AS_LONG_AS_IT_TAKES_S).stream("attend", self._name)
                self._wait_for_the_first_item(rank, until)
            except PeerLost:  # the runner restarts
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                self._member = self._runners[rank]
                return

    def _wait_for_the_first_item(self, rank: int, until: float) -> None:
        # The deadline of a stream is that of the whole stream, so the wait for one item needs its own.
        timer = threading.Timer(max(1.0, until - time.monotonic()), self._stream.close)
        timer.daemon = True
        timer.start()
        try:
            if next(self._stream, None) is None:
                raise CallTimeout(f"runner {rank} did not let the client in within {self.timeout_s:g} s")
        finally:
            timer.cancel()

    def _free_runner(self, until: float) -> int:
        """The rank of the runner with the fewest clients. One that restarts does not keep clients from the others.

        Raises:
            PeerLost, CallTimeout: no runner answers.
        """
        left_s = max(1.0, until - time.monotonic())
        arrived: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for rank, runner in enumerate(self._runners):
            call = runner.options(timeout_s=left_s).call("external_clients")
            call.add_done_callback(partial(_put, arrived, rank))
        ends = time.monotonic() + ANSWER_S
        counts: dict[int, int] = {}
        failed: Any = None
        for _ in range(len(self._runners)):
            wait_s = ends - time.monotonic() if counts else left_s + ANSWER_S  # each call ends by its own deadline
            try:
                rank, done = arrived.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                break
            if done.exception() is None:
                counts[rank] = done.result()
            else:
                failed = done
        if not counts:
            if failed is None:
                raise CallTimeout(f"no runner has answered within {left_s:g} s")
            failed.result()  # raises
        return min(counts, key=counts.__getitem__)


def _put(arrived: queue.SimpleQueue[tuple[int, Any]], rank: int, call: Any) -> None:
    arrived.put((rank, call))


PolicyClient = ExternalEnvClient
