"""Exact replay of an episode from seed and actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh.cli.main import main
from rlmesh.envs.checks import EpisodeRecording, creator_of
from rlmesh.errors import UsageError
from tests.envs.checks.broken import GlobalGenerator, Nested, Walk

MODULE = "tests.envs.checks.broken"


@pytest.mark.parametrize("make", [lambda: gymnasium.make("CartPole-v1"), lambda: gymnasium.make("Pendulum-v1"), Nested])
def test_an_episode_is_repeated_bit_for_bit(make: Any, tmp_path: Path) -> None:
    recording = EpisodeRecording.record(make, name="x", seed=5, steps=40)
    assert recording.replay(make) is None
    recording.save(tmp_path / "episode.json")
    loaded = EpisodeRecording.load(tmp_path / "episode.json")
    assert loaded == recording
    assert loaded.replay(make) is None


def test_the_first_difference_is_told() -> None:
    recording = EpisodeRecording.record(Walk, seed=1, policy=lambda observation: 2)
    assert (len(recording.actions), recording.ended) == (7, "terminated")
    other = Walk()
    other.reward = lambda: 0.0 if other.t == 4 else Walk.reward(other)  # type: ignore[method-assign]
    assert str(recording.replay(lambda: other)).startswith("step 4 was observation array([")
    assert "is now observation" in str(recording.replay(lambda: other))
    assert "reset was" in str(
        recording.replay(lambda: gymnasium.wrappers.RescaleObservation(Walk(), np.float32(0), np.float32(1)))
    )
    assert EpisodeRecording.record(GlobalGenerator).replay(GlobalGenerator) is not None


def test_record_and_replay_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "episode.json")
    assert main(["env", "record", f"{MODULE}:Walk", "--to", file, "--seed", "4"]) == 0
    assert main(["env", "replay", f"{MODULE}:Walk", "--from", file]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said == [
        f"{file}: 7 steps from seed 4, terminated", f"{MODULE}:Walk: all 7 steps are those of {file}",
    ]  # fmt: skip
    assert main(["env", "replay", f"{MODULE}:BeginsAnew", "--from", file]) == 1
    assert "differs from" in capfd.readouterr().out
    (tmp_path / "other.json").write_text("{}")
    assert main(["env", "replay", f"{MODULE}:Walk", "--from", str(tmp_path / "other.json")]) == 2
    assert "is not a recorded episode" in capfd.readouterr().err


def test_a_registered_environment_gets_its_configuration() -> None:
    env = creator_of("CartPole-v1", {"max_episode_steps": 3})()
    assert env.spec.max_episode_steps == 3
    env.close()
    with pytest.raises(UsageError, match="Did you mean 'Pendulum-v1'"):
        creator_of("Pendulun-v1")
