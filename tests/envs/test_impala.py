"""IMPALA and APPO: runners that sample while the learner trains."""

from __future__ import annotations

import copy
import os
import signal
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from rlmesh.envs import (
    APPO,
    IMPALA,
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    EnvRunner,
    EnvRunnerGroup,
    IMPALAConfig,
    ModulePolicy,
    SampleBatch,
)
from rlmesh.envs.connectors import ObservationNormalizer
from rlmesh.envs.learners.impala import APPOLearner
from rlmesh.envs.replay.circular import CircularBuffer
from rlmesh.envs.runners.async_sampler import AsyncSampler
from rlmesh.errors import UsageError

from .environments import Count
from .multi_agent.test_learning import convoy, trained


def small(config: AlgorithmConfig | None = None, runners: int = 0) -> Any:
    config = config or IMPALAConfig()
    config.environment(lambda context: Count((5,), (False,))).debugging(seed=1)
    config.env_runners(num_env_runners=runners, num_envs_per_env_runner=2, rollout_fragment_length=10)
    return config.training(train_batch_size=40).reporting(min_env_steps_per_iteration=0)


def weights_of(algorithm: Algorithm) -> np.ndarray:
    weights = algorithm.get_weights()["default_policy"]
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])


def pids_of(group: EnvRunnerGroup) -> list[int]:
    assert group._remote is not None
    calls = group._remote.options(timeout_s=60, idempotent=True)  # also while a runner is being restarted
    return [int(pid) for pid in calls.call("apply", cloudpickle.dumps(lambda runner: os.getpid())).result()]


def test_settings_that_cannot_work_are_refused() -> None:
    config = IMPALAConfig().environment("CartPole-v1")
    config.training(vtrace=False, minibatch_size=10, vtrace_clip_rho_threshold=0.0, broadcast_interval=0)
    config.training(entropy_coeff="much").env_runners(rollout_fragment_length="auto")
    with pytest.raises(UsageError) as caught:
        config.build()
    text = str(caught.value)
    assert "IMPALAConfig has 6 faults" in text
    for fault in (
        "vtrace: only True", "minibatch_size: V-trace needs whole fragments", "vtrace_clip_rho_threshold: a",
        "broadcast_interval: a whole number", "entropy_coeff: a number between 0 and 1000000, or points",
        "rollout_fragment_length",
    ):  # fmt: skip
        assert fault in text
    with pytest.raises(UsageError, match=r"tau: a number above 0 and at most 1, not 2"):
        APPOConfig().environment("CartPole-v1").training(tau=2).build()
    with pytest.raises(UsageError, match="learner_queue_size=…\\): runners are ahead by max_requests_in_flight"):
        IMPALAConfig().training(learner_queue_size=16)


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_without_remote_runners_a_restored_run_goes_on_exactly(kind: Any, tmp_path: Path) -> None:
    config = small(kind())
    if kind is APPOConfig:
        config.training(target_network_update_freq=0.25, use_kl_loss=True)
    else:  # the third training step merges the moments
        config.training(broadcast_interval=3).env_runners(connectors=[ObservationNormalizer()])
    with config.build() as whole:
        results = [whole.train() for _ in range(4)]
        expected = weights_of(whole)
    fill = 7 * 40 if kind is APPOConfig else 0  # before the first update
    assert results[-1]["timesteps_total"] == 160 + fill
    stats = results[-1]["learners"]["default_policy"]["learner_stats"]
    assert (stats["staleness_max"] > 0) == (kind is APPOConfig)
    with config.build() as first:
        first.train()
        first.train()
        first.save(tmp_path / "checkpoint")
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as second:
        second.train()
        result = second.train()
        assert np.array_equal(weights_of(second), expected)
    assert result["learners"] == results[-1]["learners"]


def test_the_target_follows_by_trained_steps_and_by_weights_that_are_set() -> None:
    config = small(APPOConfig()).training(tau=0.5, target_network_update_freq=0.25)
    with config.build() as algorithm:
        assert config.target_period() == 0.25 * 8 * 2
        learner = algorithm.get_policy().learner
        assert isinstance(learner, APPOLearner)

        def distance() -> float:
            pairs = zip(learner.target.parameters(), learner.module.parameters(), strict=True)
            return sum(float((a - b).detach().abs().sum()) for a, b in pairs)

        assert distance() == 0
        algorithm.train()  # 2 updates of 4
        moved = distance()
        assert moved > 0
        algorithm.train()  # the period is over
        assert learner.followed_at == 4
        algorithm.set_weights({"default_policy": {n: v * 2 for n, v in algorithm.get_policy().get_weights().items()}})
        assert distance() == 0


def test_the_clipped_ratio_of_appo_is_that_of_the_paper() -> None:
    policy = ModulePolicy(Count.observation_space, Count.action_space, {"seed": 3})
    config = {
        **APPOConfig().policy_config(),
        "gamma": 0.9,
        "entropy_coeff": 0.0,
        "vf_loss_coeff": 0.0,
        "clip_param": 0.1,
    }
    learner = APPOLearner(policy.module, config)
    batch = EnvRunner(lambda context: Count(), ModulePolicy, policy_config={"seed": 5}, seed=5).sample(30)
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.mul_(1.3)
    tensors = learner.tensors_of(batch)
    loss, stats = learner.loss(tensors)

    distribution = policy.module.distribution
    assert distribution is not None

    def logp(module: Any) -> np.ndarray:
        with torch.no_grad():
            found = distribution.log_prob(module.forward_train(tensors)["action_dist_inputs"], tensors["actions"])
        return np.asarray(found.numpy(), np.float64)

    now, target, sampled = logp(policy.module), logp(learner.target), batch["action_logp"].astype(np.float64)
    with torch.no_grad():
        values = policy.module.compute_values(tensors)
        _, advantages = learner.traced(tensors, torch.from_numpy(target.astype(np.float32)), values)
    ratio = np.minimum(np.exp(sampled - target), 2.0) * np.exp(now - sampled)
    gains = np.minimum(ratio * advantages.numpy(), np.clip(ratio, 0.9, 1.1) * advantages.numpy())
    assert loss.item() == pytest.approx(-gains.mean(), rel=1e-4)
    assert stats["kl"] > 0


def test_what_the_target_gave_is_kept_until_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ModulePolicy(Count.observation_space, Count.action_space, {"seed": 3})
    learner = APPOLearner(policy.module, APPOConfig().policy_config())
    runner = EnvRunner(lambda context: Count(), ModulePolicy, policy_config={"seed": 5}, seed=5)
    batches = [learner.tensors_of(runner.sample(30)) for _ in range(20)]
    state = copy.deepcopy(learner.get_state())

    def fresh(number: int) -> torch.Tensor:
        found: torch.Tensor = learner.target.forward_train(batches[number])["action_dist_inputs"]
        return found

    def same(*numbers: int) -> bool:
        return all(torch.equal(learner.target_inputs(batches[each]), fresh(each)) for each in numbers)

    with torch.no_grad():
        assert same(*range(20), *range(20))
        expected = fresh(10)
        with monkeypatch.context() as patched:  # the last 16 batches are not computed again
            patched.setattr(learner.target, "exploration_layers", lambda: torch.nn.Tanh())
            computed = learner.target_inputs(batches[0])
            assert torch.equal(computed, batches[0]["obs"].tanh())
            assert torch.equal(learner.target_inputs(batches[10]), expected)
        for parameter in policy.module.parameters():
            parameter.mul_(1.5)
        before = fresh(3)
        learner.follow(0.5)
        assert same(*range(20))
        assert not torch.equal(before, fresh(3))
        learner.set_state(state)
        assert same(*range(20))
        assert torch.equal(before, fresh(3))


def test_a_circular_buffer_uses_each_batch_so_many_times() -> None:
    buffer = CircularBuffer(3, 2, seed=0)
    drawn: list[int] = []
    for number in range(3):
        buffer.add(SampleBatch(obs=np.array([number])), [number])
    state = buffer.state()
    for _ in range(6):
        batch, versions = buffer.sample()
        assert versions == [batch["obs"][0]]
        drawn.append(versions[0])
    assert sorted(drawn) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(UsageError, match="all batches are used up"):
        buffer.sample()
    buffer.restore(state)
    assert [buffer.sample()[1][0] for _ in range(6)] == drawn
    for number in range(5):
        buffer.add(SampleBatch(obs=np.array([number])), [number])
    assert {buffer.sample()[1][0] for _ in range(6)} == {2, 3, 4}  # the oldest ones made room


def test_appo_mixes_the_last_batches() -> None:
    with small(APPOConfig()).training(circular_buffer_num_batches=4).build() as algorithm:
        assert isinstance(algorithm, APPO)
        drawn: list[tuple[int, ...]] = []
        sample = algorithm.circular.sample

        def sampled() -> Any:
            found = sample()
            drawn.append(tuple(found[1]))
            return found

        algorithm.circular.sample = sampled  # type: ignore[method-assign]
        for _ in range(12):
            algorithm.train()
            assert len(algorithm.circular) >= 1
        ages = [2 * (i // 2) - min(versions) for i, versions in enumerate(drawn)]
        assert len(drawn) == 12 * 2
        assert max(ages[8:]) > 2  # batches of steps before are drawn too
        later = [each for each in drawn if each != min(drawn)]  # the first ones are of the same weights
        assert max(map(later.count, later)) <= 2


class _FakeMember:
    """Notes the numbers of weights that it is offered, and answers at once."""

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.fails = 0

    def options(self, **_: Any) -> _FakeMember:
        return self

    def call(self, method: str, weights: Any, version: int) -> Any:
        assert method == "offer_weights"
        self.offered.append(version)
        future: Future[None] = Future()
        if self.fails:
            self.fails -= 1
            future.set_exception(ConnectionError("away"))
        else:
            future.set_result(None)
        return future


class _FakeGroup:
    num_env_runners, timeout_s, version = 1, 1.0, 0

    def __init__(self) -> None:
        self.remote_workers = [_FakeMember()]
        self.kept_weights: tuple[dict[str, Any], int] = ({}, 0)

    def keep_weights(self) -> None:
        self.kept_weights = ({}, self.version)


def test_weights_are_sent_once_for_each_broadcast(caplog: pytest.LogCaptureFixture) -> None:
    group: Any = _FakeGroup()
    sampler = AsyncSampler(group, 10, 2)
    (member,) = group.remote_workers
    for i in range(9):
        group.version += 1  # updates between broadcasts
        if i % 3 == 0:
            sampler.publish()
        sampler._offer_if_newer(0)  # as after each fragment
    assert member.offered == [1, 4, 7]
    member.fails = 1
    sampler.publish()
    sampler._offer_if_newer(0)
    assert member.offered == [1, 4, 7, 9, 9]
    assert "runner 1 did not get the weights, and gets them again: away" in caplog.text


class _Sampling:
    """A runner that samples when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def options(self, **_: Any) -> _Sampling:
        return self

    def call(self, method: str, *_: Any) -> Any:
        future: Future[Any] = Future()
        if method == "sample_fragment":
            self.asked.append(future)
        return future

    def answer(self) -> None:
        rows = SampleBatch({"obs": np.zeros((10, 4))})
        next(each for each in self.asked if not each.done()).set_result((rows, None, 0, None, None))


def test_a_runner_has_all_its_requests_while_the_learner_trains() -> None:
    group: Any = SimpleNamespace(
        remote_workers=[_Sampling()], num_env_runners=1, timeout_s=1.0, kept_weights=({}, 0), add_stats=lambda _: None,
        episodes=SimpleNamespace(keep=lambda *_: None),
    )  # fmt: skip
    (runner,) = group.remote_workers
    sampler = AsyncSampler(group, 10, 2)
    for taken in range(1, 4):
        Timer(0.05, runner.answer).start()
        assert sampler.take(10).rows == 10
        assert len(runner.asked) == taken + 2


def test_runners_sample_ahead_with_the_newest_weights_and_nothing_is_there_twice(tmp_path: Path) -> None:
    with EnvRunnerGroup(
        policy_class=ModulePolicy, env_creator=lambda context: Count((5,), (False,)), num_env_runners=2, num_envs=2,
        seed=3, new_obs=True, infos=False, connectors=[ObservationNormalizer()], run_dir=str(tmp_path / "run"),
    ) as group:  # fmt: skip
        sampler = AsyncSampler(group, 20, 2)
        first = sampler.take(60)
        assert first.rows == 60
        assert first.versions == [group.version] * 3
        seen: set[tuple[int, int]] = set()
        rows = 0

        def count(batch: SampleBatch) -> None:
            nonlocal rows
            steps = set(zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True))
            assert not steps & seen
            seen.update(steps)
            rows += len(batch)

        count(first.joined())
        versions: list[int] = []
        for i in range(12):
            group.advance()
            sampler.publish()
            if i in (3, 7):
                os.kill(pids_of(group)[i // 4], signal.SIGKILL)
            taken = sampler.take(40)
            count(taken.joined())
            versions += taken.versions
        assert max(versions) > min(versions)
        # Each runner has at most 2 fragments that were sampled before the weights of now were there.
        assert max(group.version - each for each in versions[-4:]) <= 5
        assert group.local_env_runner.connectors.shared_state()[0]["count"] > 0
        stats = group.take_stats()
        assert stats.env_steps == rows
        assert len(stats) <= rows / 5
        assert set(stats.returns) == {15.0}
        sampler.drop()
        group.local_env_runner.policy.set_weights(
            {name: value * 0 for name, value in group.local_env_runner.policy.get_weights().items()}
        )
        group.sync_weights()
        after = sampler.take(80)
        count(after.joined())
        assert after.versions == [group.version] * 4
        assert np.ptp(after.joined()["action_dist_inputs"]) == 0  # they are sampled with these weights
        sampler.stop()


def test_training_goes_on_while_runners_die(tmp_path: Path) -> None:
    with small(runners=2).build() as algorithm:
        assert isinstance(algorithm, IMPALA)
        for i in range(8):
            if i in (2, 5):
                os.kill(pids_of(algorithm.env_runner_group)[i // 3], signal.SIGKILL)
            result = algorithm.train()
            assert result["env_runners"]["num_env_steps_sampled"] == 40
            assert result["env_runners"]["episode_return_mean"] == 15.0
            # whole fragments are two episodes of each environment: none is counted twice, or in part
            assert result["env_runners"]["num_episodes_lifetime"] == (i + 1) * 8
            assert result["info"]["num_env_steps_trained"] == result["num_env_steps_sampled_lifetime"]
            stats = result["learners"]["default_policy"]["learner_stats"]
            # a runner may be so slow that the other one gives several batches before its fragment arrives
            assert 0 <= stats["staleness_mean"] <= stats["staleness_max"] <= i
        algorithm.save(tmp_path / "checkpoint")
        algorithm.train()
        weights, trained = weights_of(algorithm), algorithm.iteration
        algorithm.restore(tmp_path / "checkpoint")
        assert algorithm.iteration == trained - 1
        assert not np.array_equal(weights_of(algorithm), weights)
        stats = algorithm.train()["learners"]["default_policy"]["learner_stats"]
        assert stats["staleness_max"] <= 1  # no fragment from before is trained on


class Odd(Count):
    """One reward is NaN."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        reward = float("nan") if (self.episode, self.at) == (9, 2) else reward
        return observation, reward, terminated, truncated, info


@pytest.mark.slow
def test_a_reward_that_is_no_number_is_an_error_and_the_other_fragments_are_kept() -> None:
    config = small(runners=2).environment(lambda c: (Odd if c.worker_index == 2 and c.vector_index else Count)((5,)))
    errors, result = 0, {}
    with config.build() as algorithm:
        while algorithm.iteration < 12:
            try:
                result = algorithm.train()
            except FloatingPointError as error:
                errors += 1
                assert "environment 1 of runner 2 returned a reward that is NaN" in str(error)
        assert result["info"]["num_env_steps_trained"] == result["num_env_steps_sampled_lifetime"] == 12 * 40
        assert set(algorithm.window.returns) == {15.0}
    assert errors == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_agents_with_policies_of_their_own_learn(kind: Any, tmp_path: Path) -> None:
    config = convoy(kind().training(lr=1e-2, gamma=0.5, train_batch_size=80))
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=20)
    assert trained(config.copy().training(entropy_coeff=0.0), 8.5, 20) >= 9.0
    with config.reporting(min_env_steps_per_iteration=400).build() as first:
        first.train()
        first.save(tmp_path / "checkpoint")
        expected = first.train()["learners"]
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as second:
        assert second.train()["learners"] == expected


@pytest.mark.slow
def test_remote_learners_have_all_policies() -> None:
    config = convoy(IMPALAConfig().training(lr=1e-2, gamma=0.5, train_batch_size=80)).learners(num_learners=2)
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=4, rollout_fragment_length=20)
    config.multi_agent(policies_to_train=["second"]).reporting(min_env_steps_per_iteration=0)
    with config.build() as algorithm:
        before = algorithm.get_weights()
        results = [algorithm.train() for _ in range(3)]
        assert set(results[-1]["learners"]) == {"second"}
        for name, changes in (("first", False), ("second", True)):
            now = algorithm.get_weights()[name]
            assert any(not np.array_equal(now[key], before[name][key]) for key in now) == changes


@pytest.mark.slow
def test_appo_with_remote_learners_and_runners(tmp_path: Path) -> None:
    config = small(APPOConfig(), runners=2).learners(num_learners=2).training(use_kl_loss=True)
    with config.build() as algorithm:
        assert isinstance(algorithm, APPO)
        result = [algorithm.train() for _ in range(5)][-1]
        assert result["env_runners"]["episode_return_mean"] == 15.0
        assert result["learners"]["default_policy"]["learner_stats"]["kl"] >= 0
        assert result["info"]["num_env_steps_trained"] == 5 * 2 * 40
        algorithm.save(tmp_path / "checkpoint")
        expected = weights_of(algorithm)
        algorithm.train()
        algorithm.restore(tmp_path / "checkpoint")
        assert np.array_equal(weights_of(algorithm), expected)
        algorithm.train()


LEARNS: dict[str, Any] = {
    "IMPALA": IMPALAConfig().training(lr=2e-3),
    "APPO": APPOConfig().training(lr=2e-3, circular_buffer_num_batches=2, target_network_update_freq=1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "runners", "reaches"), [("IMPALA", 0, 400), ("IMPALA", 2, 300), ("APPO", 0, 400)])
def test_cartpole_is_learnt(name: str, runners: int, reaches: float) -> None:
    """Runs with remote runners differ from each other: how old the weights of a fragment are depends on the machine. On
    a busy one with 2 runners, a run had 391 after 350,000 steps."""
    config = LEARNS[name].copy().environment("CartPole-v1").debugging(seed=0).env_runners(num_env_runners=runners)
    with config.build() as algorithm:
        best = 0.0
        while best < reaches:
            result = algorithm.train()
            best = max(best, result["env_runners"]["episode_return_mean"])
            assert result["timesteps_total"] < 350_000, f"the best mean return was {best:.0f}"


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_schedules_count_each_step_once_however_often_it_is_used(uses: int) -> None:
    config = small(APPOConfig()).training(lr=[[0, 1e-3], [400, 0.0]], circular_buffer_num_batches=1)
    config.training(circular_buffer_iterations_per_batch=uses)
    with config.build() as algorithm:
        steps = [algorithm.train()["timesteps_total"] for _ in range(3)]
        learner: Any = algorithm.get_policy().learner
        assert steps[-1] == 120
        assert learner.steps == 120
        state = learner.get_state()
        rates = [algorithm.train()["learners"]["default_policy"]["learner_stats"]["curr_lr"] for _ in range(2)]
        assert rates[1] < rates[0]
        assert 120 / 400 <= 1 - rates[0] / 1e-3 < 160 / 400
        learner.set_state(state)
        assert learner.steps == 120
