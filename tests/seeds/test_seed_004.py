"""The code blocks of RLlib's "Key Concepts" (document 004), with other import lines and without Ray's own spellings."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlmesh.envs import (
    Algorithm,
    EnvRunner,
    EnvRunnerGroup,
    MultiAgentBatch,
    PGConfig,
    Policy,
    ResultDict,
    RolloutWorker,
    SampleBatch,
    synchronous_parallel_sample,
    train_one_step,
)

from ..own_time import HANG_S


def test_the_basic_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    # Configure.
    from rlmesh.envs import PPOConfig

    config = PPOConfig().environment(env="CartPole-v1").training(train_batch_size=4000)

    # Build.
    algo = config.build()

    # Train.
    print(algo.train())
    assert "num_env_steps_sampled: 4000" in capsys.readouterr().out
    algo.stop()


def test_the_algorithm_by_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlmesh import tune

    # Configure.
    from rlmesh.envs import PPO, PPOConfig

    config = PPOConfig().environment(env="CartPole-v1").training(train_batch_size=4000)
    trains = PPO.train

    def interrupted(self: PPO) -> ResultDict:
        if self.iteration == 1:
            raise KeyboardInterrupt  # the user's Ctrl-C: nothing else ends a trial without stop
        return trains(self)

    monkeypatch.setattr(PPO, "train", interrupted)

    # Train via Tune.
    trial = tune.run("PPO", config=config)
    assert (trial.interrupted, trial.last_result["timesteps_total"]) == (True, 4000)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rlmesh.cli.main import main

    command = 'train --run=PPO --env=CartPole-v1 --config={"train_batch_size":4000}'  # without the shell's quotes
    assert main([*command.split(), '--stop={"training_iteration": 1}']) == 0
    assert capsys.readouterr().out.startswith("PPO 1: 4000 steps")


class CustomPolicy(Policy):
    """A linear policy that learns by REINFORCE, in NumPy; the document leaves it to the reader."""

    def __init__(self, observation_space: Any, action_space: Any, config: Any) -> None:
        super().__init__(observation_space, action_space, config)
        self.w = np.zeros(observation_space.shape[0])

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any) -> Any:
        right = 1 / (1 + np.exp(-obs_batch @ self.w))
        actions = (self.rng.random(len(right)) < right).astype(np.int64)
        logp = np.log(np.where(actions == 1, right, 1 - right)).astype(np.float32)
        return actions, None, {"action_logp": logp}

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, Any]:
        to_go = np.concatenate([np.cumsum(e["rewards"][::-1])[::-1] for e in batch.split_by_episode()])
        advantages = (to_go - to_go.mean()) / (to_go.std() + 1e-8)
        right = 1 / (1 + np.exp(-batch["obs"] @ self.w))
        self.w += 2.0 * ((batch["actions"] - right) * advantages) @ batch["obs"] / len(batch)
        return {"learner_stats": {"mean_to_go": float(to_go.mean())}}

    def get_weights(self) -> Any:
        return self.w

    def set_weights(self, weights: Any) -> None:
        self.w = np.array(weights)


def test_policy_evaluation_with_workers(request: pytest.FixtureRequest) -> None:
    # Setup policy and rollout workers.
    env = gym.make("CartPole-v1")
    policy = CustomPolicy(env.observation_space, env.action_space, {})
    workers = EnvRunnerGroup(
        policy_class=CustomPolicy, env_creator=lambda c: gym.make("CartPole-v1"), num_env_runners=2
    )
    length = 0.0
    request.addfinalizer(workers.stop)
    for _ in range(200):  # the document: while True
        # Gather a batch of samples.
        T1 = SampleBatch.concat_samples(
            [f.result(HANG_S) for f in [w.call("sample") for w in workers.remote_workers()]]
        )

        # Improve the policy using the T1 batch.
        policy.learn_on_batch(T1)

        # The local worker acts as a "parameter server" here.
        weights = {"default_policy": policy.get_weights()}
        for w in workers.remote_workers():
            # ... so that we can broadcast these weights to all rollout-workers once.
            w.call("set_weights", weights)
        length = len(T1) / max(1, T1["dones"].sum())
        if length > 60:
            break
    assert length > 60  # it learns: a random policy's episodes have about 22 steps


def test_the_printed_batch() -> None:
    names = ["action_logp", "actions", "dones", "infos", "new_obs", "obs", "rewards", "t"]
    worker = RolloutWorker("CartPole-v1", CustomPolicy, seed=0)
    sample_batch = worker.sample()
    printed = repr(sample_batch)
    shown = re.findall(r"^(?:\{ |    )'(\w+)': np\.ndarray\(\((\d+),", printed, re.MULTILINE)
    assert {name for name, _ in shown} == {*names, "eps_id", "terminateds", "truncateds"}
    assert {rows for _, rows in shown} == {"200"}
    for line in (
        r"'action_logp': np\.ndarray\(\(200,\), dtype=float32, min=-[\d.]+, max=-[\d.]+, mean=-[\d.]+\)",
        r"'actions': np\.ndarray\(\(200,\), dtype=int64, min=0\.0, max=1\.0, mean=0\.\d+\)",
        r"'dones': np\.ndarray\(\(200,\), dtype=bool, min=0\.0, max=1\.0, mean=0\.\d+\)",
        r"'infos': np\.ndarray\(\(200,\), dtype=object, head=\{\}\)",
        r"'new_obs': np\.ndarray\(\(200, 4\), dtype=float32, min=-[\d.]+, max=[\d.]+, mean=-?[\d.]+\)",
        r"'obs': np\.ndarray\(\(200, 4\), dtype=float32, min=-[\d.]+, max=[\d.]+, mean=-?[\d.]+\)",
        r"'rewards': np\.ndarray\(\(200,\), dtype=float32, min=1\.0, max=1\.0, mean=1\.0\)",
        r"'t': np\.ndarray\(\(200,\), dtype=int64, min=0\.0, max=\d+\.0, mean=[\d.]+\)",
    ):
        assert re.search(line, printed), line
    worker.stop()


class MyVPG(Algorithm):
    """The document's vanilla policy gradient."""

    @classmethod
    def get_default_config(cls) -> Any:
        return PGConfig(cls)

    def training_step(self) -> ResultDict:
        # 1. Sampling.
        train_batch = synchronous_parallel_sample(
            worker_set=self.env_runner_group, max_env_steps=self.config["train_batch_size"]
        )
        assert isinstance(train_batch, MultiAgentBatch)

        # 2. Updating the Policy.
        train_results = train_one_step(self, train_batch)

        # 3. Synchronize worker weights.
        self.env_runner_group.sync_weights()

        # 4. Return results.
        return train_results


def test_the_training_step_of_vpg() -> None:
    config = PGConfig(MyVPG).environment("CartPole-v1").training(train_batch_size=512).debugging(seed=0)
    with config.build() as algo:
        assert type(algo) is MyVPG
        results = [algo.train() for _ in range(12)]
    # policy ids map to statistics of learning and sampling
    learnt = results[-1]["learners"]["default_policy"]
    assert learnt["num_agent_steps_trained"] == 512
    assert isinstance(learnt["learner_stats"]["policy_loss"], float)
    means = [result["env_runners"]["episode_return_mean"] for result in results]
    assert means[-1] > 1.5 * means[0]


def test_names_of_the_text() -> None:
    with PGConfig().environment("CartPole-v1").training(train_batch_size=64).build() as algo:
        group = algo.env_runner_group
        assert group.local_env_runner is group.local_worker is algo.env_runner
        assert list(group.remote_workers) == []
        assert isinstance(algo.env_runner, EnvRunner)
        batch = algo.env_runner.sample()
        assert algo.env_runner.learn_on_batch(batch)["default_policy"]["num_agent_steps_trained"] == len(batch)
        batches = synchronous_parallel_sample(worker_set=group, max_env_steps=16, concat=False)
        assert [type(each) for each in batches] == [MultiAgentBatch]
