"""Episodes as pictures, and ``rlmesh evaluate`` of agents."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.cli.main import main
from rlmesh.envs import Algorithm, PGConfig, make_multi_agent
from rlmesh.envs.connectors import FrameStack
from rlmesh.envs.recording.episodes import play_episode, record_episode
from rlmesh.errors import UsageError

from .checks import broken_agents
from .recurrent.tasks import LSTM

STEPS = 7


class Drawn(gym.Env[np.ndarray, Any]):
    """Counts to seven; draws the count as a bar. The reward is the action."""

    observation_space = gym.spaces.Box(0, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_fps": 10}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        self.at, self.blind = 0, config.get("blind", False)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return np.full(1, self.at, np.float32), float(action), self.at == STEPS, False, {}

    def render(self) -> Any:
        frame = np.zeros((21, 33, 3), np.uint8)
        frame[:, : self.at] = 200
        return None if self.blind else frame


def saved(folder: Path, env: Any = Drawn, **settings: Any) -> str:
    with PGConfig().environment(env, **settings).training(train_batch_size=20).build() as algorithm:
        algorithm.train()
        return algorithm.save(folder / "checkpoint")


def test_an_episode_has_a_frame_per_step_and_is_written_in_all_forms(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    config = PGConfig().environment(Drawn).env_runners(connectors=[FrameStack(2)]).training(train_batch_size=20)
    with config.debugging(seed=0).build() as algorithm:
        algorithm.train()
        episode = play_episode(algorithm)
        assert (len(episode.frames), len(episode.rewards), episode.ended, episode.fps) == (
            STEPS + 1,
            STEPS,
            "terminated",
            10,
        )
        assert [int((frame[0] == 200).all(-1).sum()) for frame in episode.frames] == list(range(STEPS + 1))
        assert episode.rewards == [algorithm.evaluate()["episode_reward_mean"] / STEPS] * STEPS
        assert play_episode(algorithm, max_steps=3).ended == ""
        assert len(play_episode(algorithm, max_steps=3).frames) == 4
        record_episode(algorithm, tmp_path / "strip.png", frames=4)
        record_episode(algorithm, tmp_path / "film.gif")
    with image.open(tmp_path / "strip.png") as picture:
        strip = np.asarray(picture)
    assert strip.shape == (21 + 16, 4 * 33 + 3 * 4, 3)
    assert (strip[0, 33 + 4 : 33 + 4 + 33] == 200).all(-1).sum() == 2  # the second frame of four is that of step 2
    with image.open(tmp_path / "film.gif") as film:
        assert film.n_frames == STEPS + 1
        assert film.info["duration"] == 100


def test_an_episode_as_a_video(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip(
        "imageio_ffmpeg", reason="imageio-ffmpeg is not installed: pip install 'rlmesh[record]'"
    )
    with Algorithm.from_checkpoint(saved(tmp_path)) as algorithm:
        record_episode(algorithm, tmp_path / "film.mp4")
    command = [ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(tmp_path / "film.mp4"), "-f", "rawvideo"]
    done = subprocess.run([*command, "-pix_fmt", "rgb24", "-"], capture_output=True, timeout=60, check=True)
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, 22, 34, 3)  # sizes are even
    assert len(frames) == STEPS + 1
    assert [int((frame[10, :33].mean(-1) > 100).sum()) for frame in frames] == list(range(STEPS + 1))


def test_the_command_evaluates_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved(tmp_path)
    picture = tmp_path / "strip.png"
    assert main(["evaluate", checkpoint, "--episodes", "3", "--record", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "num_episodes = 3" in printed
    assert "episode_len_mean = 7" in printed
    assert f"{picture}: {STEPS} steps, return" in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for wrong, says in (
        ([checkpoint, "--record", str(tmp_path / "film.avi")], "ends in .png (a strip of frames), .gif or .mp4"),
        ([checkpoint, "--record", str(tmp_path / "none" / "film.gif")], "there is no folder"),
        ([checkpoint, "--samples", "2"], "--samples: for language models"),
        ([checkpoint, "--episodes", "0"], "--episodes 0: at least 1"),
        ([str(tmp_path), "--episodes", "2"], "is no checkpoint of one"),
    ):
        assert main(["evaluate", *wrong]) == 2
        assert says in capsys.readouterr().err
    tmp_path.joinpath("checkpoint").chmod(0o777)
    assert main(["evaluate", checkpoint]) == 2
    assert "somebody else may have written there" in capsys.readouterr().err


class Beside(broken_agents.Own):
    """Draws the number of steps of both agents as a bar."""

    metadata = {"render_fps": 10}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(broken_agents.Match)

    def render(self) -> Any:
        frame = np.zeros((21, 33, 3), np.uint8)
        frame[:, : sum(self.match.times.values())] = 200
        return frame


class InTurns(Beside, broken_agents.OwnTurns):
    pass


def pettingzoo_form(name: str) -> Any:
    def creator(context: Any) -> Any:
        base: Any = broken_agents.FORMS[name]

        class Drawing(base):  # type: ignore[misc]
            render, metadata = Beside.render, Beside.metadata

        return Drawing(broken_agents.Match)

    return creator


@pytest.mark.parametrize("form", ["own", "turns", "parallel", "AEC"])
def test_an_episode_of_several_agents_is_recorded(form: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    if form not in broken_agents.FORMS:
        pytest.skip("PettingZoo is not installed (extra: pettingzoo)")
    env = {"own": Beside, "turns": InTurns}.get(form) or pettingzoo_form(form)
    config = PGConfig().environment(env).training(train_batch_size=20).rl_module(model_config=LSTM)
    config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode: agent_id)
    with config.debugging(seed=0).build() as algorithm:
        algorithm.train()
        episode = play_episode(algorithm)
        steps = 14 if form in ("turns", "AEC") else 7
        assert (len(episode.rewards), episode.ended, episode.fps) == (steps, "terminated", 10)
        bars = [int((frame[0] == 200).all(-1).sum()) for frame in episode.frames]
        assert bars == [i * 14 // steps for i in range(steps + 1)]
        assert episode.of_agents.keys() == {"a", "b"}
        assert episode.total == pytest.approx(sum(episode.of_agents.values()))
        assert all(total < -5 for total in episode.of_agents.values())  # each step costs 1 at least
        assert len(play_episode(algorithm, max_steps=3).frames) == 4
        record_episode(algorithm, tmp_path / "strip.png", frames=4)
        assert [play_episode(algorithm).total for _ in range(2)] == [episode.total] * 2  # no exploration, one seed
    with image.open(tmp_path / "strip.png") as picture:
        assert picture.size == (4 * 33 + 3 * 4, 21 + 16)


def test_copies_are_drawn_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image")
    checkpoint = saved(tmp_path, env=make_multi_agent(Drawn), env_config={"num_agents": 2})
    with Algorithm.from_checkpoint(checkpoint) as algorithm:
        frames = play_episode(algorithm).frames
    assert frames[3].shape == (21, 66, 3)
    assert (frames[3][0] == 200).all(-1).nonzero()[0].tolist() == [0, 1, 2, 33, 34, 35]
    picture = tmp_path / "strip.png"
    assert main(["evaluate", checkpoint, "--episodes", "2", "--record", str(picture)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3].startswith(f"{picture}: {STEPS} steps, return")
    assert [line.partition(" = ")[0] for line in printed[-2:]] == ["return of 0", "return of 1"]


def test_environments_that_draw_nothing_are_refused(tmp_path: Path) -> None:
    with Algorithm.from_checkpoint(saved(tmp_path, env_config={"blind": True})) as algorithm:
        with pytest.raises(UsageError, match="the environment renders no frames"):
            record_episode(algorithm, tmp_path / "strip.png")
        assert not (tmp_path / "strip.png").exists()
