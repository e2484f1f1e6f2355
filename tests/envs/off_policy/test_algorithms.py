"""DQN, SAC and TD3 as algorithms: settings, replay, exact resume, and the returns that they reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from rlmesh.envs import DQNConfig, EnvRunnerGroup, SACConfig, TD3Config, get_algorithm_class
from rlmesh.envs.replay import PrioritizedReplayBuffer, ReplayBuffer
from rlmesh.errors import UsageError

CONTINUOUS = [SACConfig, TD3Config]


def small(kind: Any, **training: Any) -> Any:
    """Settings with which an iteration takes a moment."""
    config = kind().environment("CartPole-v1" if kind is DQNConfig else "Pendulum-v1").debugging(seed=1)
    config.rl_module(model_config={"fcnet_hiddens": (16, 16)}).reporting(min_env_steps_per_iteration=40)
    config.env_runners(rollout_fragment_length=4, num_envs_per_env_runner=2)
    return config.training(train_batch_size=16, num_steps_sampled_before_learning_starts=20, **training)


@pytest.mark.parametrize("kind", [DQNConfig, *CONTINUOUS])
def test_training_goes_on_exactly_after_a_restore(kind: Any, tmp_path: Path) -> None:
    config = small(kind, replay_buffer_config={"type": "PrioritizedReplayBuffer", "capacity": 70}, n_step=3)
    with config.build() as one, config.build() as other:
        one.train()
        one.train()
        one.save(tmp_path / "checkpoint")
        results = [one.train()]
        other.restore(tmp_path / "checkpoint")
        results.append(other.train())
        ours, theirs = (algorithm.get_weights()["default_policy"] for algorithm in (one, other))
        for name, value in ours.items():
            assert np.array_equal(value, theirs[name]), name
        stats = [result["learners"]["default_policy"]["learner_stats"] for result in results]
        assert stats[0] == stats[1]
        assert len(one.replay) == len(other.replay) == 70
        assert one.env_steps_sampled == other.env_steps_sampled == 120


def test_updates_follow_the_training_intensity() -> None:
    """8 steps per training step; 16 replayed rows per update: an intensity of 3 makes 1.5 updates of them."""
    with small(DQNConfig, training_intensity=3.0).build() as algorithm:
        algorithm.train()  # 40 steps; the first 16 come before the start, and their updates are not made up for
        assert algorithm.learner.updates == 4
        algorithm.train()
        assert algorithm.learner.updates == 4 + 8
        assert algorithm.agent_steps_trained == 12 * 16
    with small(SACConfig).build() as algorithm:
        algorithm.train()
        assert algorithm.learner.updates == 3


def test_schedules_of_the_learning_rate_count_sampled_steps() -> None:
    with small(SACConfig, lr=[[0, 1e-3], [400, 0.0]]).build() as algorithm:
        stats = algorithm.train()["learners"]["default_policy"]["learner_stats"]
        assert algorithm.env_steps_sampled == 40
        assert stats["curr_lr"] == pytest.approx(1e-3 * (1 - 40 / 400))


@pytest.mark.parametrize("kind", [DQNConfig, *CONTINUOUS])
@pytest.mark.parametrize("by_group", [False, True])
def test_targets_take_over_weights_that_are_set(kind: Any, by_group: bool) -> None:
    with small(kind).build() as one, small(kind).debugging(seed=2).build() as other:
        (one.learner_group if by_group else one).set_weights(other.get_weights())
        learner = one.learner
        for target, online in zip(learner.target.parameters(), learner.followed().parameters(), strict=True):
            assert np.array_equal(target.detach().numpy(), online.detach().numpy())


def test_runners_explore_as_the_settings_say_from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    def sync_weights(group: EnvRunnerGroup, *_: Any) -> None:
        sent.append(float(group.local_env_runner.get_weights()["default_policy"]["epsilon"]))

    monkeypatch.setattr(EnvRunnerGroup, "sync_weights", sync_weights)
    with small(DQNConfig, epsilon=0.1).build():
        assert sent[-1:] == [pytest.approx(0.1)]


def test_the_buffer_is_that_of_the_settings() -> None:
    with small(SACConfig).build() as algorithm:
        assert type(algorithm.replay) is ReplayBuffer
        algorithm.train()
        assert set(algorithm.replay.sample(2)) == {
            "obs", "new_obs", "actions", "rewards", "terminateds", "batch_indexes",
        }  # fmt: skip
        actions = algorithm.replay.sample(200)["actions"]
        assert 0.8 < np.abs(actions).max() <= 1
    with small(DQNConfig, n_step=2).build() as algorithm:
        assert isinstance(algorithm.replay, PrioritizedReplayBuffer)
        assert (algorithm.replay.n_step, algorithm.replay.gamma) == (2, 0.99)
        algorithm.train()
        assert set(algorithm.replay.sample(40)["n_steps"]) == {1, 2}
        assert not np.all(algorithm.replay.sample(40)["weights"] == 1)


def test_time_limits_are_bootstrapped() -> None:
    """Pendulum ends by its time limit only: no stored step is terminal, and n steps do not cross the limit."""
    with small(SACConfig, n_step=3).build() as algorithm:
        while algorithm.env_steps_sampled < 440:
            algorithm.train()
        rows = algorithm.replay.sample(4000)
        assert not rows["terminateds"].any()
        ends = rows["truncateds"]
        assert ends.any()
        assert set(rows["t"][ends]) == {197, 198, 199}
        assert np.array_equal(rows["n_steps"][ends], 200 - rows["t"][ends])


def test_all_faults_of_the_settings_come_at_once() -> None:
    config = small(DQNConfig, epsilon="much", tau=0, n_step=0, replay_buffer_config={"typ": "x", "eta": 1})
    config.env_runners(rollout_fragment_length="auto")
    with pytest.raises(UsageError) as raised:
        config.build()
    for text in (
        "epsilon: a number", "tau: a number above 0", "n_step: a whole number between 1 and 10000", "no key 'typ'",
        "'type'", "eta belongs to the type 'PrioritizedSequenceReplayBuffer'",
        "rollout_fragment_length: a whole number",
    ):  # fmt: skip
        assert text in str(raised.value)
    with pytest.raises(UsageError, match="target_entropy"):
        small(SACConfig, target_entropy="high").build()
    with pytest.raises(UsageError, match="policy_delay"):
        small(TD3Config, policy_delay=0).build()
    with pytest.raises(UsageError, match=r"DQN acts in a Discrete space.*SAC and TD3"):
        small(DQNConfig).environment("Pendulum-v1").build()


@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3"])
def test_algorithms_are_known_by_name(name: str) -> None:
    assert get_algorithm_class(name).get_default_config().algorithm_class.__name__ == name


@pytest.mark.slow
def test_dqn_balances_a_pole() -> None:
    config: Any = DQNConfig().environment("CartPole-v1").debugging(seed=0).evaluation(evaluation_duration=10)
    with config.build() as algorithm:
        while algorithm.env_steps_sampled < 20_000:
            algorithm.train()
            if algorithm.env_steps_sampled > 8000 and algorithm.evaluate()["episode_reward_mean"] >= 300:
                return
    raise AssertionError("DQN has not reached a return of 300 within 20,000 steps")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTINUOUS)
def test_a_pendulum_is_swung_up(kind: Any) -> None:
    """A random policy gets about -1200, a perfect one about -150."""
    config = kind().environment("Pendulum-v1").debugging(seed=0).evaluation(evaluation_duration=5)
    config.rl_module(model_config={"fcnet_hiddens": (64, 64)})
    with config.build() as algorithm:
        while algorithm.env_steps_sampled < 9000:
            algorithm.train()
            if algorithm.env_steps_sampled > 2000 and algorithm.evaluate()["episode_reward_mean"] >= -300:
                return
    raise AssertionError("the mean return has not reached -300 within 9,000 steps")


@pytest.mark.slow
def test_runners_in_other_processes_explore_as_the_algorithm_says() -> None:
    config = small(DQNConfig, epsilon=[[0, 1.0], [100, 0.2]])
    with config.env_runners(num_env_runners=2).build() as algorithm:
        algorithm.train()
        algorithm.train()
        algorithm.train()
        shares = algorithm.env_runner_group.foreach_worker(lambda runner: float(runner.policy.module.epsilon))
        assert shares == [pytest.approx(0.2)] * 3
        assert algorithm.env_steps_sampled == len(algorithm.replay) >= 120


def test_settings_of_a_buffer_keep_its_type() -> None:
    """``{"capacity": …}`` made a uniform buffer of DQN's prioritised one."""
    with small(DQNConfig, replay_buffer_config={"capacity": 500, "alpha": 0.7}).build() as algorithm:
        assert isinstance(algorithm.replay, PrioritizedReplayBuffer)
        assert (algorithm.replay.capacity, algorithm.replay.alpha) == (500, 0.7)
    with small(SACConfig, replay_buffer_config={"capacity": 500}).build() as algorithm:
        assert type(algorithm.replay) is ReplayBuffer
    with small(DQNConfig, replay_buffer_config={"type": "ReplayBuffer"}).build() as algorithm:
        assert type(algorithm.replay) is ReplayBuffer
        assert algorithm.replay.capacity == 100_000


@pytest.mark.parametrize("envs", [1, 6, 49])
def test_each_training_step_makes_one_update_without_an_intensity(envs: int) -> None:
    """Also if some rows are resets, and whatever 49 times a 49th is in floating point."""

    def creator(context: Any) -> Any:
        return SyncVectorEnv([lambda: TimeLimit(PendulumEnv(), 3)] * envs)

    config = small(SACConfig).environment(creator).env_runners(rollout_fragment_length=1)
    config.training(num_steps_sampled_before_learning_starts=0).reporting(min_env_steps_per_iteration=0)
    with config.build() as algorithm:
        for number in range(1, 9):
            algorithm.train()
            assert algorithm.learner.updates == number
