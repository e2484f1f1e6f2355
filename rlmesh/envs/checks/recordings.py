"""Episodes written down by seed and actions, and played again exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh.envs.checks.agents import playable
from rlmesh.envs.checks.episodes import actions_of
from rlmesh.envs.checks.values import digest, short
from rlmesh.envs.checks.values import ended as over
from rlmesh.errors import UsageError

__all__ = ["EpisodeRecording", "TracedStep"]

FORMAT = 1


@dataclass(frozen=True)
class TracedStep:
    """Everything that a call of an environment returned, for comparison.

    Attributes:
        label: the call.
        digest: equal for equal observation, reward and flags, bit for bit.
        text: the returned values, shortened.
    """

    label: str
    digest: str
    text: str

    @classmethod
    def of(cls, label: str, observation: Any, reward: Any = None, *flags: Any) -> TracedStep:
        """The step that returned these values."""
        text = f"observation {short(observation)}" + (f", reward {short(reward)}" if reward is not None else "")
        text += f", ended {[over(flag) for flag in flags]}" if flags and all(_scalar(flag) for flag in flags) else ""
        return cls(label, digest([observation, reward, *flags]), text)


def _scalar(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 0


def first_difference_of(
    left: Iterable[TracedStep], right: Iterable[TracedStep]
) -> tuple[TracedStep, TracedStep] | None:
    """The first two steps that differ."""
    return next(
        ((ours, theirs) for ours, theirs in zip(left, right, strict=False) if ours.digest != theirs.digest), None
    )


@dataclass(frozen=True)
class EpisodeRecording:
    """One episode: the environment's name, the seed, the actions, and what the environment returned.

    Attributes:
        name: name of the environment, as `creator_of` takes it.
        seed: seed of the reset.
        actions: the actions, as the action space's ``to_jsonable`` writes them.
        steps: the reset, then each step.
        ended: ``terminated``, ``truncated``, or ``""`` for an episode that was left.
    """

    name: str
    seed: int
    actions: list[Any]
    steps: list[TracedStep]
    ended: str

    @classmethod
    def record(
        cls, make: Callable[[], Any], *, name: str = "", seed: int = 0, steps: int = 1000,
        policy: Callable[[Any], Any] | None = None,
    ) -> EpisodeRecording:  # fmt: skip
        """Play one episode of at most ``steps`` steps and write it down.

        Args:
            make: makes the environment, of one agent or of several.
            name: its name, for `replay`.
            seed: seed of the reset, and of random actions.
            steps: the most steps.
            policy: maps an observation to an action; of several agents, a dict of observations to one of actions of
                the same agents. Without one, actions are random.
        """
        env = playable(make)()
        try:
            observation, _ = env.reset(seed=seed)
            traced = [TracedStep.of("reset", observation)]
            actions: list[Any] = []
            ended = ""
            random = actions_of(env, seed)
            while len(actions) < steps and not ended:
                action = policy(observation) if policy is not None else next(random)
                actions.append(action)
                # Written down before the step, which may change its argument.
                actions[-1] = env.action_space.from_jsonable(env.action_space.to_jsonable([action]))[0]
                observation, reward, terminated, truncated, _ = env.step(action)
                traced.append(TracedStep.of(f"step {len(actions)}", observation, reward, terminated, truncated))
                ended = "terminated" if over(terminated) else "truncated" if over(truncated) else ""
            written = env.action_space.to_jsonable(actions)
            return cls(name, seed, json.loads(json.dumps(written)), traced, ended)
        finally:
            env.close()

    def replay(
        self, make: Callable[[], Any], seen: Callable[[Any, float | None], None] = lambda observation, reward: None
    ) -> str | None:
        """Play the recorded actions again; the first difference as text, or None if the episode is the same.

        Args:
            make: makes the environment.
            seen: called with each observation, and with the reward of the step that led to it (None for the first one).
        """
        env = playable(make)()
        try:
            actions = env.action_space.from_jsonable(self.actions)
            observation, _ = env.reset(seed=self.seed)
            again = [TracedStep.of("reset", observation)]
            seen(observation, None)
            for number, action in enumerate(actions, 1):
                observation, reward, terminated, truncated, _ = env.step(action)
                again.append(TracedStep.of(f"step {number}", observation, reward, terminated, truncated))
                seen(observation, reward)
                if again[-1].digest != self.steps[number].digest:
                    break
        finally:
            env.close()
        different = first_difference_of(self.steps, again)
        if different is None:
            return None
        return f"{different[0].label} was {different[0].text}, and is now {different[1].text}"

    def save(self, path: str | Path) -> None:
        """Write the recording as JSON."""
        content = {"format": FORMAT, **vars(self), "steps": [vars(step) for step in self.steps]}
        Path(path).write_text(json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> EpisodeRecording:
        """The recording in a file.

        Raises:
            UsageError: the file is no recording.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content.pop("format") != FORMAT:
                raise ValueError("it has another format")
            return cls(**{**content, "steps": [TracedStep(**step) for step in content["steps"]]})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a recorded episode ({error}); `rlmesh env record` writes one") from error
