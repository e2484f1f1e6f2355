"""`EnvProcess`: an environment of several agents in a process of its own."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rlmesh.envs.multi_agent.environment import MultiAgentEnv
from rlmesh.envs.multi_agent.pettingzoo_env import several_agents_env
from rlmesh.errors import UsageError

__all__ = ["EnvProcess", "serve"]

MAIN_ALIAS = "__mp_main__"
"""The name under which workers of a job, and of multiprocessing, import the user's program."""
CLOSE_S = 5.0
"""Seconds that an environment may take to close; then its process is killed."""


class EnvProcess(MultiAgentEnv):
    """Stands for an environment in another process, which ends with this object or with this process.

    A pickle has the environment as it is; what comes out of it has a process of its own.

    Args:
        make: makes the environment, in the other process.

    Raises:
        UsageError: the environment has one agent, or ``make`` cannot be pickled.
        ChildProcessError: the process ended.
        Exception: what ``make`` raised.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        code = f"from rlmesh.envs.multi_agent.env_process import serve; serve({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,  # Ctrl-C is for this process
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._steps = False
        try:
            self._send(_pickled(make))
            found = self._answer()
        except BaseException:
            self.close()
            raise
        self.possible_agents, self.metadata, self.render_mode = found

    def begin_step(self, actions: Mapping[Any, Any]) -> None:
        """Begin a step, whose results the next `step` returns; meanwhile, other environments may step."""
        self._drain()
        self._send(pickle.dumps(("step", (actions,), {})))
        self._steps = True

    def step(self, actions: Any) -> Any:
        if not self._steps:
            self.begin_step(actions)
        self._steps = False
        return self._answer()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._ask("reset", seed=seed, options=options)

    def known_agents(self) -> list[Any]:
        found: list[Any] = self._ask("known_agents")
        return found

    def get_observation_space(self, agent_id: Any) -> Any:
        return self._ask("get_observation_space", agent_id)

    def get_action_space(self, agent_id: Any) -> Any:
        return self._ask("get_action_space", agent_id)

    def render(self) -> Any:
        return self._ask("render")

    def apply(self, fn: Callable[[Any], Any]) -> Any:
        """``fn(environment)``, in the other process."""
        return self._ask("", _pickled(fn))

    def close(self) -> None:
        """Close the environment and end its process; a second call does nothing."""
        try:
            self._drain()
            self._send(pickle.dumps(("close", (), {})))
            self._connection.poll(CLOSE_S)
        except (OSError, EOFError):
            pass  # the process has ended already
        self._connection.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __reduce__(self) -> Any:
        return EnvProcess, (partial(pickle.loads, self._ask("", _pickled(_with_its_episode))),)

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._drain()
        self._send(pickle.dumps((name, args, kwargs)))
        return self._answer()

    def _drain(self) -> None:
        """Wait for the results of a step that nobody asked for."""
        if self._steps:
            self._steps = False
            with suppress(EOFError, OSError):  # the next message finds that the process has ended
                self._connection.recv_bytes()

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._ended() from error

    def _answer(self) -> Any:
        try:
            raised, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if raised:
            raise value
        return value

    def _ended(self) -> ChildProcessError:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            code = None
        return ChildProcessError(f"the process of an environment ended with exit code {code}")


def _pickled(value: Any) -> bytes:
    """The pickle of a value for another program: classes and functions of the main module travel by value."""
    import cloudpickle

    main = sys.modules.get(MAIN_ALIAS)
    if main is not None:
        cloudpickle.register_pickle_by_value(main)
    try:
        found: bytes = cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(f"vectorize_mode='async': {value!r} cannot be sent to another process: {error}") from error
    finally:
        if main is not None:
            cloudpickle.unregister_pickle_by_value(main)
    return found


def _with_its_episode(env: Any) -> bytes:
    """The pickle of an environment; an error if it would come back without its episode."""
    from rlmesh.envs.environments.pickling import EnvironmentPickler

    EnvironmentPickler()([env])
    return _pickled(env)


def serve(descriptor: int) -> None:
    """Make an environment and do what the messages of a socket ask for, until the socket is closed."""
    with Connection(descriptor) as connection:
        env: Any = None

        def begin(pickled: bytes) -> Any:
            nonlocal env
            env = several_agents_env(pickle.loads(pickled)())
            return list(env.possible_agents), env.metadata, env.render_mode

        try:
            connection.send_bytes(_outcome(begin, connection.recv_bytes()))
            while True:
                name, args, kwargs = pickle.loads(connection.recv_bytes())
                call = getattr(env, name) if name else lambda fn: pickle.loads(fn)(env)
                connection.send_bytes(_outcome(call, *args, **kwargs))
        except (EOFError, OSError):
            if env is not None:
                _outcome(env.close)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the finalisation of what the environment has imported, which may take seconds


def _outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """The pickle of False and a result, or of True and an error."""
    try:
        return pickle.dumps((False, call(*args, **kwargs)))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        error.add_note(f"in the process of the environment:\n{text}")
        try:
            found = pickle.dumps((True, error))
            pickle.loads(found)
        except Exception:  # an error that does not come back from a pickle
            return pickle.dumps((True, RuntimeError(text)))
        return found
