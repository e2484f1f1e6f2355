"""Plays an episode with the policy of an algorithm, and keeps the frames that its environment renders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlmesh.envs.algorithms.algorithm import Algorithm
from rlmesh.envs.environments.registry import EnvContext, env_creator_of
from rlmesh.envs.multi_agent.environment import ALL, MultiAgentEnv
from rlmesh.envs.multi_agent.pettingzoo_env import multi_agent_env_of
from rlmesh.envs.multi_agent.runner import MultiAgentEnvRunner
from rlmesh.envs.recording.pictures import require_format, write_frames
from rlmesh.envs.runners.env_runner import EnvRunner
from rlmesh.errors import UsageError

__all__ = ["RecordedEpisode", "play_episode", "record_episode"]

MAX_STEPS = 10_000
"""Steps after which a recording ends, for environments whose episodes have no end."""


@dataclass
class RecordedEpisode:
    """An episode that a policy played.

    Attributes:
        frames: what the environment rendered after the reset and after each step, ``[height, width, 3]``, uint8.
        rewards: of each step.
        of_agents: with several agents, the sum of the rewards of each; ``rewards`` are then sums over the agents.
        ended: ``terminated``, ``truncated``, or empty if the recording ended first.
        fps: frames per second that the environment names; 30 if it names none.
    """

    frames: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    of_agents: dict[str, float] = field(default_factory=dict)
    ended: str = ""
    fps: int = 30

    @property
    def total(self) -> float:
        """The sum of the rewards."""
        return float(sum(self.rewards))


class _Enough(Exception):
    """The episode has all the steps that are wanted."""


class _Film:
    """Keeps the frames of an environment, from its first reset to the end of its first episode."""

    def __init__(self, env: Any, episode: RecordedEpisode, steps: int) -> None:
        self._env, self._episode, self._left, self._begun = env, episode, steps, False

    def reset(self, **arguments: Any) -> Any:
        """The environment's ``reset``."""
        if self._begun:
            raise _Enough
        self._begun = True
        outcome = self._env.reset(**arguments)
        self._keep()
        return outcome

    def step(self, action: Any) -> Any:
        """The environment's ``step``."""
        if self._left == 0:
            raise _Enough
        self._left -= 1
        outcome = self._env.step(action)
        _, reward, terminated, truncated, _ = outcome
        if isinstance(reward, Mapping):
            own, totals = {str(agent): float(each or 0.0) for agent, each in reward.items()}, self._episode.of_agents
            totals.update({agent: totals.get(agent, 0.0) + each for agent, each in own.items()})
            reward, terminated, truncated = sum(own.values()), terminated.get(ALL), truncated.get(ALL)
        self._episode.rewards.append(float(reward))
        self._keep()
        self._episode.ended = "terminated" if terminated else "truncated" if truncated else ""
        return outcome

    def _keep(self) -> None:
        frame = self._env.render()
        if isinstance(frame, list):  # render_mode="rgb_array_list"
            frame = frame[-1] if frame else None
        frame = np.asarray(frame) if frame is not None else np.zeros(0)
        if frame.ndim != 3 or frame.shape[-1] not in (3, 4) or frame.dtype != np.uint8:
            mode = getattr(self._env, "render_mode", None)
            given = f"{frame.dtype} of shape {frame.shape}" if frame.size else "nothing"
            raise UsageError(
                f"the environment renders no frames: render() with render_mode={mode!r} gave {given}; it should give "
                "uint8 of shape (height, width, 3), as with render_mode='rgb_array'"
            )
        self._episode.frames.append(frame[..., :3].copy())


class _Filmed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment of one agent with a film."""

    def __init__(self, env: Any, film: _Film) -> None:
        super().__init__(env)
        self.reset, self.step = film.reset, film.step  # type: ignore[method-assign]


class _FilmedAgents(MultiAgentEnv):
    """An environment of several agents with a film."""

    def __init__(self, env: MultiAgentEnv, film: _Film) -> None:
        self.env = env
        self.possible_agents = env.known_agents()
        self.reset, self.step = film.reset, film.step  # type: ignore[method-assign]
        self.get_observation_space, self.get_action_space = env.get_observation_space, env.get_action_space  # type: ignore[method-assign]

    def close(self) -> None:
        self.env.close()


def play_episode(algorithm: Algorithm, *, seed: int | None = 0, max_steps: int = MAX_STEPS) -> RecordedEpisode:
    """Play one episode with the policy of an algorithm, without exploration, in an environment of its evaluations.

    Args:
        seed: of the environment.
        max_steps: the recording ends after that many steps.

    Raises:
        UsageError: the environment renders no frames.
    """
    episode = RecordedEpisode()
    arguments = algorithm._runner_arguments(algorithm.config.of_evaluation())
    settings = dict(arguments.pop("env_config"))
    creator: Callable[[EnvContext], Any] = env_creator_of(arguments.pop("env_creator"))
    if getattr(getattr(creator, "cls", creator), "env_id", None) is not None:
        settings["render_mode"] = "rgb_array"

    def filmed(context: EnvContext) -> Any:
        try:
            env = creator(context)
        except gymnasium.error.DependencyNotInstalled as error:
            raise UsageError(f"the environment cannot be rendered: {error}") from error
        if isinstance(env, gymnasium.vector.VectorEnv):
            raise UsageError("a recording plays one environment; the creator made a vector environment")
        several = multi_agent_env_of(env)
        env = env if several is None else several
        episode.fps = int((getattr(env, "metadata", None) or {}).get("render_fps") or episode.fps)
        film = _Film(env, episode, max_steps)
        return _Filmed(env, film) if several is None else _FilmedAgents(several, film)

    del arguments["sample_timeout_s"]  # of a group
    arguments |= {
        "num_envs": 1, "seed": seed, "explore": False, "vectorize_mode": "local", "learn_connectors": False,
        "restart_failed_sub_environments": False,
        "policy_config": {**arguments["policy_config"], "estimate_advantages": None},
    }  # fmt: skip
    if "policy_configs" in arguments:
        configs = arguments["policy_configs"].items()
        arguments["policy_configs"] = {name: {**each, "estimate_advantages": None} for name, each in configs}
    kind = MultiAgentEnvRunner if isinstance(algorithm.env_runner, MultiAgentEnvRunner) else EnvRunner
    runner = kind(filmed, **arguments, env_config=settings)
    try:
        runner.set_weights(algorithm.env_runner.get_weights())
        while True:
            runner.sample(64)
    except _Enough:
        return episode
    except gymnasium.error.DependencyNotInstalled as error:
        raise UsageError(f"the environment cannot be rendered: {error}") from error
    finally:
        runner.stop()


def record_episode(
    algorithm: Algorithm, path: str | Path, *, seed: int | None = 0, max_steps: int = MAX_STEPS, frames: int = 8
) -> RecordedEpisode:
    """Play an episode and write it as a strip of frames (``.png``), an animation (``.gif``) or a video (``.mp4``).

    Args:
        path: the file; its ending chooses the form.
        frames: frames of a strip.

    Raises:
        UsageError: another ending, a library that is not installed, or an environment that renders no frames.
    """
    require_format(Path(path))
    episode = play_episode(algorithm, seed=seed, max_steps=max_steps)
    write_frames(Path(path), episode.frames, episode.rewards, fps=episode.fps, strip=frames)
    return episode
