"""Settings do what they say: lengths of fragments, episodes of all runners, actions within their space."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh.envs import (
    ActorCriticModule,
    DQNConfig,
    EnvRunner,
    EnvRunnerGroup,
    ModulePolicy,
    PGConfig,
    Policy,
    PPOConfig,
    SACConfig,
    TD3Config,
    make_multi_agent,
    synchronous_parallel_sample,
)
from rlmesh.envs.algorithms.results import EpisodeWindow
from rlmesh.envs.runners.episode_stats import EpisodeStats
from rlmesh.errors import UsageError

from .environments import Count, Frames, Target


@pytest.mark.parametrize(("length", "expected"), [("auto", 20), (20, 20), (5, 5), (7, 7)])
def test_advantages_look_as_far_as_the_fragment(length: Any, expected: int) -> None:
    config = PGConfig().environment(lambda context: Count(lengths=(1000,))).debugging(seed=1)
    config.env_runners(num_envs_per_env_runner=2, rollout_fragment_length=length).training(train_batch_size=40)
    with config.build() as algorithm:
        group = algorithm.env_runner_group
        batch = synchronous_parallel_sample(worker_set=group, max_env_steps=40)["default_policy"]
    fragments = -(-20 // expected)
    assert len(batch) == 2 * expected * fragments
    gamma, lambda_ = config["gamma"], config["lambda_"]
    by_env: dict[int, list[Any]] = {}
    for i in range(2 * fragments):  # environment 0, environment 1, and again
        by_env.setdefault(i % 2, []).append(batch[i * expected : (i + 1) * expected])
    for parts in by_env.values():
        assert np.concatenate([part["t"] for part in parts]).tolist() == list(range(expected * fragments))
        for part, following in pairwise(parts):
            after = np.append(part["vf_preds"][1:], following["vf_preds"][0])
            ahead = 0.0
            for t in reversed(range(expected)):
                ahead = part["rewards"][t] + gamma * after[t] - part["vf_preds"][t] + gamma * lambda_ * ahead
                assert part["advantages"][t] == pytest.approx(ahead, rel=1e-4)


def test_a_group_without_a_fragment_length_samples_in_one_go() -> None:
    group = EnvRunnerGroup(policy_class=ModulePolicy, env_creator=lambda context: Count(), num_envs=2)
    batch = synchronous_parallel_sample(worker_set=group, max_env_steps=1000)["default_policy"]
    assert len(batch) == 1000


def test_means_are_over_the_episodes_of_all_runners() -> None:
    """Runners of unlike environments: the last 100 episodes are not those of the last runner."""
    parts = [EpisodeStats([float(i)] * n, [i] * n, env_steps=n) for i, n in ((1, 300), (2, 100), (3, 200))]
    stats = EpisodeStats.interleaved(parts)
    assert (len(stats), stats.env_steps) == (600, 600)
    window = EpisodeWindow(100)
    window.add(stats)
    shares = [list(window.returns).count(float(i)) for i in (1, 2, 3)]
    assert shares == pytest.approx([50, 100 / 6, 100 / 3], abs=1)
    ordered = EpisodeStats.interleaved(
        [EpisodeStats([1.0, 2.0, 3.0], [1, 2, 3]), EpisodeStats(), EpisodeStats([9.0], [9])]
    )
    assert [each for each in ordered.returns if each < 9] == [1, 2, 3]
    assert ordered.lengths == [int(each) for each in ordered.returns]


class Far(Policy):
    """Acts far outside of the space."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        return np.full((len(obs_batch), 1), 7.0, np.float32), None, {}


class FarModule(ActorCriticModule):
    """Returns actions itself, far outside of the space."""

    def forward_exploration(self, batch: Any) -> dict[str, Any]:
        return {"actions": torch.full((len(batch["obs"]), 1), -7.0)}


@pytest.mark.parametrize(("policy", "config", "sign"), [(Far, {}, 1), (ModulePolicy, {"module_class": FarModule}, -1)])
def test_environments_get_actions_within_their_box(policy: Any, config: dict[str, Any], sign: int) -> None:
    seen = []

    class Watched(Target):
        def step(self, action: Any) -> Any:
            seen.append(action.copy())
            return super().step(action)

    batch = EnvRunner(lambda context: Watched(), policy, policy_config=config, num_envs=2).sample(6)
    assert np.array_equal(seen, np.full((6, 1), sign))
    assert (batch["actions"] == 7 * sign).all()  # as it was chosen
    with PGConfig().environment(lambda context: Target()).rl_module(module_class=FarModule).build() as algorithm:
        assert algorithm.compute_single_action(np.zeros(1, np.float32), explore=True) == -1


class Wrong(Policy):
    """Counts its actions from another start than the space."""

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        return np.zeros(len(obs_batch), int), None, {}


class FromOne(Count):
    """`Count` with the actions 1 and 2."""

    action_space = gym.spaces.Discrete(2, start=1)


def test_an_action_that_is_not_in_the_space_is_the_policys_fault() -> None:
    with pytest.raises(UsageError, match=r"Wrong chose the action 0, which is not in Discrete\(2, start=1\)"):
        EnvRunner(lambda context: FromOne(), Wrong).sample(3)


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(UsageError, match="num_epochs: each replayed batch is used once"):
        DQNConfig().environment("CartPole-v1").training(num_epochs=4).build()
    with pytest.raises(UsageError, match="minibatch_size: each replayed batch"):
        SACConfig().environment("Pendulum-v1").training(minibatch_size=4).build()
    config = PPOConfig().environment("CartPole-v1")
    with pytest.raises(UsageError, match="evaluation_config: 'num_env_runners' changes nothing"):
        config.copy().evaluation(evaluation_config={"num_env_runners": 2}).build()
    with pytest.raises(UsageError, match="Did you mean 'explore'"):
        config.copy().evaluation(evaluation_config={"explor": True}).build()


def test_weights_of_the_loss_are_checked_and_may_follow_a_schedule() -> None:
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size=64, minibatch_size=32)
    with pytest.raises(UsageError) as raised:
        config.copy().training(entropy_coeff="x", vf_loss_coeff=-1, kl_coeff=None, vf_clip_param=0).build()
    for text in (
        "entropy_coeff: a number between 0 and 1000000, or points", "vf_loss_coeff: a number between 0 and 1000000",
        "kl_coeff: a number between 0 and", "vf_clip_param: a number above 0",
    ):  # fmt: skip
        assert text in str(raised.value)
    with config.training(entropy_coeff=[[0, 0.02], [128, 0.0]]).build() as algorithm:
        learner: Any = algorithm.get_policy().learner  # type: ignore[attr-defined]
        seen = []
        for _ in range(3):
            algorithm.train()
            seen.append(learner.entropy_coeff)
    assert seen == pytest.approx([0.02, 0.01, 0.0])


class NoArgument(Count):
    """Takes no configuration."""

    def __init__(self) -> None:
        super().__init__()


def test_a_configuration_that_nobody_takes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"env_config has 'size', which is no argument of NoArgument. It takes none"):
        PPOConfig().environment(NoArgument, env_config={"size": 3}).build()
    EnvRunner(NoArgument, ModulePolicy).stop()


def test_evaluation_runners_restart_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    plain = EnvRunnerGroup.__init__

    def init(self: Any, **given: Any) -> None:
        made.append(given)
        plain(self, **given)

    monkeypatch.setattr(EnvRunnerGroup, "__init__", init)
    config = PPOConfig().environment("CartPole-v1").fault_tolerance(restart_failed_env_runners=False)
    with config.evaluation(evaluation_duration=1).build() as algorithm:
        algorithm.evaluate()
    assert [given["max_restarts"] for given in made] == [0, 0]


def test_off_policy_steps_count_the_environments_of_a_vector() -> None:
    """Beside remote runners, the local one has one environment, unless the creator makes vectors."""
    config = DQNConfig().environment(lambda context: SyncVectorEnv([Count] * 3)).env_runners(rollout_fragment_length=2)
    algorithm: Any
    with config.build() as algorithm:
        algorithm.env_runner_group.num_env_runners = 2  # as if there were remote runners
        assert algorithm.env_runner_group.envs_of_a_runner == 3
        assert algorithm._steps == 6
    config = DQNConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=1)
    with config.build() as algorithm:
        group = algorithm.env_runner_group
        group.num_env_runners, group._num_envs = 2, 5
        assert group.envs_of_a_runner == 5


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
def test_steps_that_reset_cost_no_further_fragments(mode: AutoresetMode) -> None:
    """With fragments of one batch in all, a batch does not have twice its size since some rows are no steps."""

    def creator(context: Any) -> Any:
        return SyncVectorEnv([lambda: Count((5,), (False,))] * 2, autoreset_mode=mode)

    config = PGConfig().environment(creator).env_runners(rollout_fragment_length=20).training(train_batch_size=40)
    with config.debugging(seed=1).build() as algorithm:
        for _ in range(3):
            result = algorithm.train()
            assert 32 <= result["env_runners"]["num_env_steps_sampled"] <= 40
        batch = synchronous_parallel_sample(worker_set=algorithm.env_runner_group, max_env_steps=41)
        assert 64 <= batch.env_steps() <= 80


def test_evaluations_change_single_keys_of_the_environment() -> None:
    class Sized(Frames):
        seen: ClassVar[list[Any]] = []

        def __init__(self, config: Any) -> None:
            self.seen.append((config["side"], config.get("hard", False)))

    config = PPOConfig().environment(Sized, env_config={"side": 7}).evaluation(evaluation_duration=1)
    config.rl_module(model_config={"conv_filters": [[4, 8, 4]], "conv_features": 8})
    with config.evaluation(evaluation_config={"env_config": {"hard": True}}).build() as algorithm:
        assert set(Sized.seen) == {(7, False)}
        Sized.seen.clear()
        algorithm.evaluate()
        assert set(Sized.seen) == {(7, True)}
        assert algorithm.config["env_config"] == {"side": 7}
    config.evaluation(evaluation_config={"env": lambda context: Count(), "env_config": {"other": 1}})
    assert config.of_evaluation()["env_config"] == {"other": 1}


@pytest.mark.parametrize("kind", [DQNConfig, SACConfig, TD3Config])
@pytest.mark.parametrize("key", ["vf_share_layers", "log_std_init"])
def test_settings_of_networks_that_are_not_there_are_refused(kind: Any, key: str) -> None:
    config = kind().environment("CartPole-v1" if kind is DQNConfig else "Pendulum-v1")
    value = 0.5 if key == "log_std_init" else True
    with pytest.raises(UsageError, match=f"'{key}': .*this algorithm.*Leave the key out"):
        config.rl_module(model_config={key: value}).build()


@pytest.mark.parametrize("several", [False, True])
def test_policies_without_a_seed_begin_with_weights_of_their_own(several: bool) -> None:
    """All of them drew their weights of the same state of torch's generator, which stays as it is."""
    before = torch.get_rng_state()

    def weights(policies: dict[str, Any]) -> list[np.ndarray]:
        return [each["encoder.1.weight"] for each in policies.values()]

    if several:
        config = PPOConfig().environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
        config.multi_agent(policies=["a", "b"], policy_mapping_fn=lambda agent, episode: "ab"[agent])
        with config.build() as algorithm:
            one, other = weights(algorithm.get_weights())
    else:
        (one,), (other,) = (weights(EnvRunner("CartPole-v1", ModulePolicy).get_weights()) for _ in range(2))
    assert not np.array_equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    seeded = [weights(EnvRunner("CartPole-v1", ModulePolicy, seed=0).get_weights())[0] for _ in range(2)]
    assert np.array_equal(seeded[0], seeded[1])
