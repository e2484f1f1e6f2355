"""An environment of one's own, with pictures of what the agent does: python own_environment.py [--record maze.gif]

The agent walks through a small maze; each step costs a little, the exit pays. The environment draws itself, so an
episode can be recorded as a strip of frames (.png), an animation (.gif) or a video (.mp4).
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np

from rlmesh.envs import EnvContext, PPOConfig, register_env

MAZE = ["S....#..", ".###.#.#", "...#....", "##.#.##.", "...#..#E"]
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
CELL = 16
COLORS = {"#": (60, 60, 70), ".": (235, 235, 230), "S": (200, 215, 235), "E": (120, 190, 120)}


class Maze(gym.Env[int, int]):
    """Cells are numbered row by row; actions are up, right, down, left."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, context: EnvContext) -> None:
        self.maze = context.get("maze", MAZE)
        self.rows, self.columns = len(self.maze), len(self.maze[0])
        self.observation_space = gym.spaces.Discrete(self.rows * self.columns)
        self.action_space = gym.spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = (0, 0)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        row, column = (at + move for at, move in zip(self.at, MOVES[action], strict=True))
        if 0 <= row < self.rows and 0 <= column < self.columns and self.maze[row][column] != "#":
            self.at = (row, column)
        done = self.maze[self.at[0]][self.at[1]] == "E"
        return self._observation(), 1.0 if done else -0.02, done, False, {}

    def render(self) -> np.ndarray:  # type: ignore[override]
        cells = np.array([[COLORS[cell] for cell in line] for line in self.maze], np.uint8)
        frame = cells.repeat(CELL, 0).repeat(CELL, 1)
        top, left = self.at[0] * CELL + 4, self.at[1] * CELL + 4
        frame[top : top + CELL - 8, left : left + CELL - 8] = (200, 60, 60)
        return frame

    def _observation(self) -> int:
        return self.at[0] * self.columns + self.at[1]


register_env("maze", lambda context: gym.wrappers.TimeLimit(Maze(context), 200))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="FILE", help="record an episode of the trained agent")
    options = parser.parse_args()
    config = PPOConfig().environment("maze").training(train_batch_size=1024, minibatch_size=256, entropy_coeff=0.01)
    with config.debugging(seed=0).learners(torch_threads=1).build() as algorithm:
        for _ in range(25):
            result = algorithm.train()
        print(f"steps to the exit: {algorithm.evaluate()['env_runners']['episode_len_mean']:.0f}")
        if options.record:
            from rlmesh.envs.recording.episodes import record_episode

            print(f"{options.record}: return {record_episode(algorithm, options.record).total:.2f}")
