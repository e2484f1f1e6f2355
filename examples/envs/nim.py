"""PPO learns a game of turns in an environment of PettingZoo, against an opponent that moves at random: python nim.py

Two players take one to three of ten sticks in turns; who takes the last one wins. The first player can always win.
"""

from typing import Any

from gymnasium.spaces import Discrete
from pettingzoo import AECEnv

from rlmesh.envs import Algorithm, Policy, PolicySpec, PPOConfig, register_env

STICKS = 10


class Nim(AECEnv):
    """An observation is the number of sticks; action n takes n + 1 of them, or as many as are left."""

    metadata = {"name": "nim", "render_modes": []}  # noqa: RUF012 (PettingZoo's form)

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["player_0", "player_1"]

    def observation_space(self, agent: str) -> Discrete:
        return Discrete(STICKS + 1)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(3)

    def observe(self, agent: str) -> int:
        return self.sticks

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents, self.sticks = list(self.possible_agents), STICKS
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action: Any) -> None:
        player = self.agent_selection
        if self.terminations[player]:
            self._was_dead_step(action)
            return
        opponent = next(agent for agent in self.possible_agents if agent != player)
        self._cumulative_rewards[player] = 0.0
        self._clear_rewards()
        self.sticks -= min(int(action) + 1, self.sticks)
        if self.sticks == 0:
            self.rewards = {player: 1.0, opponent: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = opponent
        self._accumulate_rewards()


class Random(Policy):
    """Moves at random."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        return self.rng.integers(self.action_space.n, size=len(obs_batch)), None, {}


def trained(*, self_play: bool = False, wanted: float = 0.95, iterations: int = 40, seed: int = 0) -> Algorithm:
    """The algorithm, once the first player's mean return has reached ``wanted``: 1 is a win, −1 a loss.

    Args:
        self_play: the opponent learns too, with a policy of its own.
    """
    register_env("nim", lambda context: Nim())
    config = (
        PPOConfig()
        .environment("nim")
        .multi_agent(
            policies={"first": PolicySpec(), "second": PolicySpec(None if self_play else Random)},
            policy_mapping_fn=lambda agent_id, episode: "first" if agent_id == "player_0" else "second",
            policies_to_train=["first", "second"] if self_play else ["first"],
        )
        .env_runners(num_envs_per_env_runner=16)
        .training(train_batch_size=2048, minibatch_size=128, lr=2e-3, entropy_coeff=0.01)
        .debugging(seed=seed)
    )
    algorithm = config.build()
    for _ in range(iterations):
        mean = algorithm.train()["env_runners"]["agent_episode_returns_mean"]["player_0"]
        print(f"{algorithm.window.env_steps} steps, mean return of the first player {mean:.2f}")
        if mean >= wanted:
            break
    return algorithm


if __name__ == "__main__":
    with trained() as algorithm:
        result = algorithm.evaluate()["env_runners"]["agent_episode_returns_mean"]
        print(f"mean return of the first player in an evaluation: {result['player_0']:.2f}")
        opening = 1 + algorithm.compute_single_action(STICKS, policy_id="first", explore=False)
        print(f"it begins by taking {opening}")
