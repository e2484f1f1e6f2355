"""Environments of PettingZoo: those of both interfaces, and that policies learn in them."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rlmesh.envs import MultiAgentEnvRunner, ParallelPettingZooEnv, PettingZooEnv, Policy, PPOConfig
from rlmesh.envs.multi_agent.pettingzoo_env import multi_agent_env_of
from rlmesh.errors import UsageError

from .environments import Always, Anything

pettingzoo: Any = pytest.importorskip("pettingzoo", reason="PettingZoo is not installed (extra: pettingzoo)")
gymnasium = pytest.importorskip("gymnasium")

nim: Any = import_module("examples.envs.nim")


def classic(name: str) -> Any:
    """A module of PettingZoo's classic games, which draw with pygame."""
    pytest.importorskip("pygame", reason="pygame is not installed (extra: pettingzoo)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"pettingzoo.classic.{name}")


class Lights(pettingzoo.ParallelEnv):  # type: ignore[misc]
    """Each agent is paid for saying whether its light is on; agent i stays for i + 2 steps; the last one is truncated.

    Args:
        same_arrays: reuse one array per agent for all its observations.
    """

    metadata = {"name": "lights"}  # noqa: RUF012
    possible_agents = ("0", "1", "2")

    def __init__(self, same_arrays: bool = False) -> None:
        self.same_arrays = same_arrays
        self.arrays = {agent: np.zeros(1, np.float32) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self._observe(self.agents), {agent: {} for agent in self.agents}

    def _observe(self, agents: list[str]) -> dict[str, Any]:
        self.on = {agent: int(self.random.integers(2)) for agent in agents}
        for agent, on in self.on.items():
            if not self.same_arrays:
                self.arrays[agent] = np.zeros(1, np.float32)
            self.arrays[agent][:] = 2 * on - 1
        return {agent: self.arrays[agent] for agent in agents}

    def step(self, actions: Any) -> tuple[Any, ...]:
        assert list(actions) == self.agents
        self.time += 1
        rewards = {agent: float(action == self.on[agent]) for agent, action in actions.items()}
        gone = {agent: self.time == int(agent) + 2 for agent in actions}
        terminated = {agent: over and agent != "2" for agent, over in gone.items()}
        truncated = {agent: over and agent == "2" for agent, over in gone.items()}
        observations = self._observe(self.agents)
        self.agents = [agent for agent in self.agents if not gone[agent]]
        return observations, rewards, terminated, truncated, {agent: {} for agent in actions}


def test_a_parallel_environment() -> None:
    env = multi_agent_env_of(Lights())
    assert isinstance(env, ParallelPettingZooEnv)
    runner = MultiAgentEnvRunner(lambda context: Lights(), Always, seed=1)
    batch = runner.sample(8)["default_policy"]
    ends = [(int(p["agent_index"][0]), len(p), bool(p["terminateds"][-1]), bool(p["truncateds"][-1]))
            for p in batch.split_by_episode()]  # fmt: skip
    assert ends == [(0, 2, True, False), (1, 3, True, False), (2, 4, False, True)] * 2
    assert runner.take_stats().lengths == [4, 4]
    assert len(np.unique(batch["obs"])) == 2


def test_arrays_that_an_environment_reuses_are_copied() -> None:
    def sampled(same_arrays: bool) -> Any:
        return MultiAgentEnvRunner(lambda context: Lights(same_arrays), Always, num_envs=2, seed=1).sample(30)

    fresh, reused = sampled(False), sampled(True)
    assert fresh == reused


def test_an_agent_that_leaves_without_a_flag_is_an_error() -> None:
    class Loses(Lights):
        def step(self, actions: Any) -> tuple[Any, ...]:
            results = super().step(actions)
            self.agents = self.agents[1:]
            return results

    runner = MultiAgentEnvRunner(
        lambda context: Loses(), Always, restart_failed_sub_environments=False
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"agent '0' left env.agents, but is neither terminated nor truncated"):
        runner.sample(1)


@pytest.mark.slow
def test_one_policy_learns_for_all_lights() -> None:
    """9 is the largest return."""
    config = PPOConfig().environment(lambda context: Lights()).training(
        train_batch_size=200, minibatch_size=100, lr=3e-3, gamma=0.0
    )  # fmt: skip
    with config.env_runners(num_envs_per_env_runner=4).debugging(seed=0).build() as algorithm:
        for _ in range(15):
            algorithm.train()
        assert algorithm.evaluate()["env_runners"]["episode_return_mean"] >= 8.5


class Fixed(Policy):
    """Takes the actions of a list in turns, and starts anew with each runner."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        self.used = getattr(self, "used", 0)
        plan = self.config["plan"]
        actions = [plan[(self.used + i) % len(plan)] for i in range(len(obs_batch))]
        self.used += len(obs_batch)
        return np.array(actions), None, {}


def test_turns_of_an_environment() -> None:
    """Ten sticks, each player takes three: the first one makes the moves 10 and 4, the second one 7 and 1."""
    env = multi_agent_env_of(nim.Nim())
    assert isinstance(env, PettingZooEnv)
    assert env.reset()[0] == {"player_0": 10}
    runner = MultiAgentEnvRunner(
        lambda context: nim.Nim(), Always, policies=["player_0", "player_1"], policy_config={"action": 2}
    )
    batch = runner.sample(4)
    first, second = batch["player_0"], batch["player_1"]
    assert first["obs"].tolist() == [10, 4]
    assert second["obs"].tolist() == [7, 1]
    # The loser's last action gets its reward, though the end came with the winner's move.
    assert first["rewards"].tolist() == [0.0, -1.0]
    assert second["rewards"].tolist() == [0.0, 1.0]
    assert first["terminateds"].tolist() == second["terminateds"].tolist() == [False, True]
    assert first["new_obs"].tolist() == [4, 0]
    stats = runner.take_stats()
    assert (stats.returns, stats.lengths) == ([0.0], [4])
    assert stats.of_agents == [{"player_0": ("player_0", -1.0), "player_1": ("player_1", 1.0)}]


@pytest.mark.slow
def test_a_policy_learns_to_win_a_game_of_turns() -> None:
    """Against random moves, the first player wins always if it plays right."""
    with nim.trained() as algorithm:
        result = algorithm.evaluate()["env_runners"]["agent_episode_returns_mean"]
        assert result["player_0"] >= 0.8
        assert algorithm.compute_single_action(10, policy_id="first", explore=False) == 1  # takes two, leaves eight


@pytest.mark.slow
def test_two_policies_learn_from_each_other() -> None:
    """The first player wins against a second one that learns too."""
    with nim.trained(self_play=True, wanted=0.98, iterations=80) as algorithm:
        result = algorithm.evaluate()["env_runners"]["agent_episode_returns_mean"]
        assert result["player_0"] == 1.0


@pytest.mark.parametrize("interface", ["env", "parallel_env"])
def test_rock_paper_scissors(interface: str) -> None:
    """PettingZoo's game, in both of its interfaces: paper beats the opponent's rock in each of 15 rounds."""
    game = classic("rps_v2")
    config = (
        PPOConfig()
        .environment(lambda context: getattr(game, interface)(max_cycles=15))
        .multi_agent(
            policies={"learner": None, "rock": Always}, policies_to_train=["learner"],
            policy_mapping_fn=lambda agent_id, episode: "learner" if agent_id == "player_0" else "rock",
        )
        .training(train_batch_size=400, minibatch_size=100, lr=5e-3)
        .env_runners(num_envs_per_env_runner=2)
        .debugging(seed=0)
    )  # fmt: skip
    with config.build() as algorithm:
        for _ in range(10):
            algorithm.train()
        result = algorithm.evaluate()["env_runners"]
    assert result["agent_episode_returns_mean"]["player_0"] >= 14.0
    assert result["agent_episode_returns_mean"]["player_1"] <= -14.0


class RandomLegal(Policy):
    """Takes any legal move: the row begins with the mask, since the parts of a Dict are sorted by their names."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        mask = obs_batch[:, :9]
        return (mask * self.rng.uniform(0.1, 1, mask.shape)).argmax(-1), None, {}


@pytest.mark.slow
def test_tic_tac_toe_against_random_moves() -> None:
    """An illegal move loses. The beginner draws or wins most games: its mean return is 0.7 or more (random: 0.3)."""
    game = classic("tictactoe_v3")
    config = (
        PPOConfig()
        .environment(lambda context: game.env())
        .multi_agent(
            policies={"learner": None, "random": RandomLegal}, policies_to_train=["learner"],
            policy_mapping_fn=lambda agent_id, episode: "learner" if agent_id == "player_1" else "random",
        )
        .training(train_batch_size=4096, minibatch_size=256, lr=2e-3, entropy_coeff=0.01)
        .env_runners(num_envs_per_env_runner=8)
        .debugging(seed=0)
    )  # fmt: skip
    with config.build() as algorithm:
        for _ in range(30):
            result = algorithm.train()["env_runners"]["agent_episode_returns_mean"]
            if result["player_1"] >= 0.85:
                break
        result = algorithm.evaluate()["env_runners"]["agent_episode_returns_mean"]
    assert result["player_1"] >= 0.7


def test_a_random_opponent_is_a_policy_too() -> None:
    runner = MultiAgentEnvRunner(
        lambda context: nim.Nim(), Anything, num_envs=3, seed=4
    )  # fmt: skip
    batch = runner.sample(num_episodes=20)
    assert len(runner.take_stats()) == 20
    assert set(batch["default_policy"]["actions"].tolist()) == {0, 1, 2}
