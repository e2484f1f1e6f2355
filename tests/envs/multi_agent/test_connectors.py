"""Connectors with several agents: each agent has its own frames, the agents of a policy share statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import DQNConfig, MultiAgentBatch, MultiAgentEnvRunner, PPOConfig
from rlmesh.envs.connectors import Connector, FrameStack, ObservationNormalizer, RewardClip
from rlmesh.errors import UsageError

from .environments import Anything, Convoy, Event, Scripted, Shift, Turns
from .test_trajectories import ALTERNATING, scripts


def runner_of(episodes: list[list[Event]], *connectors: Connector, **more: Any) -> MultiAgentEnvRunner:
    fails = more.pop("fails", None)
    made: list[Scripted] = []

    def creator(context: Any) -> Scripted:
        made.append(Scripted(episodes, fails if not made else None))
        return made[-1]

    more.setdefault("policy_mapping_fn", lambda agent_id, episode: "odd" if agent_id == "b" else "even")
    return MultiAgentEnvRunner(creator, Anything, connectors=connectors, policies={"even", "odd"}, seed=3, **more)


def joined(runner: MultiAgentEnvRunner, fragments: list[int]) -> MultiAgentBatch:
    batches = [runner.sample(steps) for steps in fragments]
    found: MultiAgentBatch = MultiAgentBatch.concat_samples(batches)
    return found


@settings(max_examples=30, deadline=None)
@given(
    episodes=st.lists(scripts(), min_size=1, max_size=3), fragments=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    number=st.integers(1, 3), frames=st.integers(1, 3),
    fails=st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 3))),
)  # fmt: skip
def test_each_agent_has_its_own_frames(
    episodes: list[list[Event]], fragments: list[int], number: int, frames: int, fails: tuple[int, int] | None
) -> None:
    """In any order of turns, over edges of fragments, with agents that come late, and in environments that break."""
    more: dict[str, Any] = {"num_envs": number, "fails": fails}
    plain = joined(runner_of(episodes, **more), fragments)
    stacked = joined(runner_of(episodes, FrameStack(frames), **more), fragments)
    assert plain.policy_batches.keys() == stacked.policy_batches.keys()
    for name, part in plain.policy_batches.items():
        other = stacked[name]
        for column in ("eps_id", "t", "actions", "rewards", "terminateds", "truncateds"):
            assert np.array_equal(part[column], other[column])
        for trajectory in np.unique(part["eps_id"]):
            rows = np.flatnonzero(part["eps_id"] == trajectory)
            rows = rows[np.argsort(part["t"][rows])]
            seen = [*[part["obs"][rows[0]]] * (frames - 1), *part["obs"][rows], part["new_obs"][rows[-1]]]
            for place, row in enumerate(rows):
                assert np.array_equal(other["obs"][row], np.concatenate(seen[place : place + frames]))
                after = np.concatenate(seen[place + 1 : place + frames + 1])
                if np.array_equal(part["new_obs"][row], part["obs"][row]):  # terminated without a last observation
                    after = other["obs"][row]
                assert np.array_equal(other["new_obs"][row], after)


def test_agents_of_a_policy_share_moments_that_are_exact() -> None:
    """They are those of all observations that agents may act on; the last ones of trajectories are not learnt from."""
    runner = runner_of([ALTERNATING], ObservationNormalizer(clip=50), num_envs=2)
    before = runner.sample(40)
    connectors = runner.connectors
    deltas = connectors.take_delta()
    connectors.merge([deltas])
    raw = runner_of([ALTERNATING], num_envs=2).sample(40)
    for name in ("even", "odd"):
        shared = connectors.shared_state()[name][0]
        # The episode that has begun has shown its first observation, [5, 0], to agent "a" of each environment.
        rows = [raw[name]["obs"], *[np.array([[5, 0]])] * (2 if name == "even" else 0)]
        expected = np.concatenate(rows).astype(np.float64)
        assert shared["count"] == len(expected)
        assert np.allclose(shared["mean"], expected.mean(0), rtol=1e-12)
        assert np.allclose(shared["squares"], ((expected - expected.mean(0)) ** 2).sum(0), rtol=1e-10)
    assert not np.array_equal(before["even"]["obs"], raw["even"]["obs"])
    after = runner.sample(40)["odd"]
    again = runner_of([ALTERNATING], num_envs=2)
    again.sample(40)
    raw_odd = again.sample(40)["odd"]["obs"]
    moments = connectors.shared_state()["odd"][0]
    deviation = np.sqrt(moments["squares"] / moments["count"])
    assert np.allclose(after["obs"], np.clip((raw_odd - moments["mean"]) / deviation, -50, 50), atol=1e-4)
    fresh = MultiAgentEnvRunner(
        lambda context: Scripted([ALTERNATING]), Anything, connectors=[ObservationNormalizer(clip=50)],
        policies={"even", "odd"}, policy_mapping_fn=lambda agent_id, episode: "odd" if agent_id == "b" else "even",
        learn_connectors=False,
    )  # fmt: skip
    fresh.set_weights(runner.get_weights())
    row = fresh.sample(4)["odd"]["obs"][0]
    assert np.allclose(row, np.clip((np.array([0, 1]) - moments["mean"]) / deviation, -50, 50), atol=1e-4)
    fresh.connectors.merge([fresh.connectors.take_delta()])
    assert fresh.connectors.shared_state()["odd"][0]["count"] == moments["count"]


def test_policies_learn_from_clipped_rewards_and_results_have_the_given_ones() -> None:
    runner = runner_of([ALTERNATING], RewardClip(0, 2))
    batch = runner.sample(8)
    assert batch["even"]["rewards"].tolist() == [2, 2, 2, 2]  # clipped are 1 + 2 and 4 - 1, the sums between turns
    assert batch["even"]["env_rewards"].tolist() == [3, 3, 3, 3]
    assert batch["odd"]["rewards"].tolist() == [2, 1, 2, 1]
    assert batch["odd"]["env_rewards"].tolist() == [30, 1, 30, 1]
    assert runner.take_stats().returns == [37, 37]
    assert "env_rewards" not in runner_of([ALTERNATING], FrameStack(2)).sample(8)["even"]


class Counted(Connector):
    """Replaces a reward by the number of rewards of this agent so far."""

    def bind(self, space: Any, size: int) -> Any:
        self.count = 0
        return space

    def clip_rewards(self, rewards: np.ndarray) -> np.ndarray:
        counted = self.count + 1 + np.arange(rewards.shape[1], dtype=np.float32)[None]
        self.count += rewards.shape[1]
        return counted


def test_connectors_of_ones_own_are_those_of_one_agent() -> None:
    batch = joined(runner_of([ALTERNATING], Counted()), [3, 2, 4, 7])
    assert batch["even"]["rewards"].tolist() == batch["odd"]["rewards"].tolist() == list(range(1, 9))


def test_agents_that_come_and_go_take_over_pipelines() -> None:
    runner = MultiAgentEnvRunner(Shift, Anything, num_envs=2, seed=0, connectors=[RewardClip()])
    for _ in range(5):
        runner.sample(100)
    pipelines = runner.connectors._pipelines["default_policy"]
    assert 2 <= len(pipelines) <= 6  # at most three workers at once


def ppo(connectors: list[Connector], env: Any = Convoy) -> Any:
    config = PPOConfig().environment(env).training(train_batch_size=60, minibatch_size=30, num_epochs=2)
    config.env_runners(num_envs_per_env_runner=4, connectors=connectors).debugging(seed=0)
    return config.rl_module(model_config={"fcnet_hiddens": (16,)})


def test_a_restored_run_goes_on_exactly(tmp_path: Path) -> None:
    """A fragment of 15 steps of each environment ends in the middle of an episode."""
    connectors = [FrameStack(2), ObservationNormalizer()]
    config = ppo(connectors, lambda context: Turns()).multi_agent(policies={"left", "right"})
    with config.build() as one, config.build() as other:
        one.train()
        one.save(tmp_path / "checkpoint")
        results = [one.train()]
        other.restore(tmp_path / "checkpoint")
        results.append(other.train())
        ours, theirs = one.get_weights(), other.get_weights()
        assert ours.keys() == theirs.keys() == {"left", "right", "__connectors__"}
        for name in ("left", "right"):
            for key, value in ours[name].items():
                assert np.array_equal(value, theirs[name][key])
            moments = [weights["__connectors__"][name][1] for weights in (ours, theirs)]
            assert moments[0]["count"] == moments[1]["count"] > 60
            assert moments[0]["squares"].tobytes() == moments[1]["squares"].tobytes()
        assert results[0]["learners"] == results[1]["learners"]
        before = one.env_runner.connectors.shared_state()["left"][1]["count"]
        assert one.evaluate()["env_runners"]["num_episodes"] == 10
        assert one.env_runner.connectors.shared_state()["left"][1]["count"] == before
        assert one.get_policy("left").observation_space.shape == (4,)


def test_single_actions_pass_through_connectors() -> None:
    with ppo([RewardClip()], lambda context: Turns()).build() as algorithm:
        assert algorithm.compute_single_action(np.zeros(2, np.float32)) in (0, 1)
    with (
        ppo([FrameStack(2)], lambda context: Turns()).build() as algorithm,
        pytest.raises(UsageError, match="2 stacked observations has no action for one"),
    ):
        algorithm.compute_single_action(np.zeros(2, np.float32))


@pytest.mark.slow
def test_all_runners_have_the_same_moments() -> None:
    config = ppo([ObservationNormalizer()], lambda context: Turns()).env_runners(num_env_runners=2)
    with config.build() as algorithm:
        for _ in range(2):
            algorithm.train()
        states = algorithm.env_runner_group.foreach_worker(lambda runner: runner.connectors.shared_state())
        moments = [state["default_policy"][0] for state in states]
        assert len(moments) == 3
        assert len({each["squares"].tobytes() for each in moments}) == len({each["count"] for each in moments}) == 1
        assert moments[0]["count"] >= 120


class Soon(Turns):
    """`Turns` in which each agent answers at its second turn: two frames show the cue, one does not."""

    wait = 1


@pytest.mark.parametrize("frames", [2, 1])
def test_frames_of_ones_own_solve_the_task(frames: int) -> None:
    """2 is the largest return of both agents; a policy of one frame gets 0 plus noise (a deviation of 0.1)."""
    config = ppo([FrameStack(frames)], lambda context: Soon()).training(train_batch_size=512, minibatch_size=128)
    config.training(lr=1e-2, num_epochs=4).evaluation(evaluation_duration=200)
    with config.build() as algorithm:
        for _ in range(10):
            algorithm.train()
        found = algorithm.evaluate()["env_runners"]["episode_return_mean"]
    assert found >= 1.9 if frames == 2 else abs(found) <= 0.6


def test_replay_has_what_the_policies_got() -> None:
    config: Any = DQNConfig().environment(lambda context: Turns()).env_runners(connectors=[FrameStack(3)])
    config.reporting(min_env_steps_per_iteration=300).training(num_steps_sampled_before_learning_starts=100)
    with config.env_runners(rollout_fragment_length=10).build() as algorithm:
        algorithm.train()
        rows = algorithm.replay.sample(50)
        rows = rows.get("default_policy", rows)
        assert rows["obs"].shape == rows["new_obs"].shape == (50, 6)


class Mixed(Convoy):
    observation_spaces = {"first": gym.spaces.Discrete(2), "second": gym.spaces.Box(0, 1, (1,))}  # noqa: RUF012


def test_connectors_that_do_not_fit_are_refused() -> None:
    config = ppo([FrameStack(2)], Mixed).multi_agent(policies=["first", "second"])
    with pytest.raises(UsageError, match="policy 'first': FrameStack needs observations in a Box"):
        config.build()
    with pytest.raises(UsageError, match="connectors: a list of objects"):
        ppo(["FrameStack"]).build()  # type: ignore[list-item]


def test_policies_may_have_connectors_of_their_own(tmp_path: Path) -> None:
    connectors: Any = {"left": [FrameStack(2), ObservationNormalizer()], "right": []}
    config = ppo(connectors, lambda context: Turns()).multi_agent(policies={"left", "right"})
    with config.build() as one, config.build() as other:
        assert one.get_policy("left").observation_space.shape == (4,)
        assert one.get_policy("right").observation_space.shape == (2,)
        one.train()
        assert set(one.env_runner.connectors.shared_state()["right"]) == set()
        one.save(tmp_path / "checkpoint")
        results = [one.train()]
        other.restore(tmp_path / "checkpoint")
        results.append(other.train())
        assert results[0]["learners"] == results[1]["learners"]
        assert one.evaluate()["env_runners"]["num_episodes"] == 10


def test_observations_of_a_policy_without_connectors_are_those_of_the_environment() -> None:
    plain = runner_of([ALTERNATING]).sample(40)
    mapped: Any = {"even": [FrameStack(2), RewardClip(0, 2)]}
    policies = {"even", "odd"}
    runner = MultiAgentEnvRunner(
        lambda context: Scripted([ALTERNATING]), Anything, connectors=mapped, policies=policies, seed=3,
        policy_mapping_fn=lambda agent_id, episode: "odd" if agent_id == "b" else "even",
    )  # fmt: skip
    batch = runner.sample(40)
    assert np.array_equal(batch["odd"]["obs"], plain["odd"]["obs"])
    assert np.array_equal(batch["odd"]["rewards"], plain["odd"]["rewards"])
    assert "env_rewards" in batch["even"] and "env_rewards" not in batch["odd"]
    assert batch["even"]["obs"].shape[1] == 4
    assert np.array_equal(batch["even"]["obs"][:, 2:], plain["even"]["obs"])


def test_a_mapping_of_connectors_names_policies_that_are_there() -> None:
    config = ppo({"lefft": [RewardClip()]}, lambda context: Turns())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"connectors: there is no policy 'lefft'. Did you mean 'left'"):
        config.copy().multi_agent(policies={"left", "right"}).build()
    with pytest.raises(UsageError, match=r"connectors: a list .* or a dict of such lists by policy, not"):
        config.copy().env_runners(connectors={"left": 3}).multi_agent(policies={"left", "right"}).build()
    one = PPOConfig().environment("CartPole-v1").env_runners(connectors={"default_policy": [FrameStack(2)]})
    with one.training(train_batch_size=64, minibatch_size=32).build() as algorithm:
        assert algorithm.get_policy().observation_space.shape == (8,)
        algorithm.train()
    with pytest.raises(UsageError, match="connectors: there is no policy 'x'"):
        one.copy().env_runners(connectors={"x": []}).build()
