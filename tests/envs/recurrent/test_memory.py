"""Modules with memory: a pass over padded sequences equals the steps of runners, and values have the right state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import (
    A2CConfig,
    ActorCriticModule,
    Algorithm,
    EnvRunner,
    ModulePolicy,
    PGConfig,
    Policy,
    PPOConfig,
    RLModule,
    SampleBatch,
)
from rlmesh.envs.learners.learner import Learner
from rlmesh.envs.learners.policy_gradient import ActorCriticLearner, PPOLearner
from rlmesh.envs.learners.sequences import forward_sequences, sequences_of
from rlmesh.envs.modules.distributions import distribution_of
from rlmesh.errors import UsageError

from .tasks import (
    ATTENTION,
    GAMMA,
    LSTM,
    MODELS,
    Cue,
    Waves,
    assert_same_gradients,
    check_against_whole_episodes,
    unrolled,
)

MODES = [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def runner_of(model: dict[str, Any], mode: AutoresetMode | None = None, size: int = 3, **env: Any) -> EnvRunner:
    config = {"estimate_advantages": True, "gamma": GAMMA, "lambda_": 0.0, "model_config": model}

    def creator(context: Any) -> Any:
        def make() -> Waves:
            return Waves(**env)

        return make() if mode is None else SyncVectorEnv([make] * size, autoreset_mode=mode)

    return EnvRunner(creator, ModulePolicy, policy_config=config, num_envs=size, seed=3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_states_and_values_of_runners_are_those_of_whole_episodes(name: str, mode: AutoresetMode | None) -> None:
    """Episodes that go on over edges of fragments, that are terminated, truncated, and in each autoreset mode."""
    runner = runner_of(MODELS[name], mode, lengths=(3, 11, 2), truncated=(False, True, True))
    batch: SampleBatch = SampleBatch.concat_samples([runner.sample(steps) for steps in (9, 21, 3, 30)])
    assert check_against_whole_episodes(batch, runner.policy.module) == len(batch)  # type: ignore[attr-defined]


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    truncated=st.lists(st.booleans(), min_size=4, max_size=4),
    fragments=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    longest=st.integers(1, 7),
    name=st.sampled_from(sorted(MODELS)),
)
def test_a_pass_over_padded_sequences_equals_the_steps(
    lengths: list[int], truncated: list[bool], fragments: list[int], longest: int, name: str
) -> None:
    runner = runner_of(MODELS[name], size=2, lengths=tuple(lengths), truncated=tuple(truncated[: len(lengths)]))
    module: RLModule = runner.policy.module  # type: ignore[attr-defined]
    batch: SampleBatch = SampleBatch.concat_samples([runner.sample(2 * steps) for steps in fragments])
    states = list(module.get_initial_state())
    sequences = sequences_of(batch, ("obs", "action_dist_inputs", "vf_preds", "t", "eps_id"), states, longest)
    mask = sequences["mask"]
    assert mask.sum() == len(batch)
    assert mask.shape[1] <= longest
    for episodes, times, there in zip(sequences["eps_id"], sequences["t"], mask, strict=True):
        assert len(set(episodes[there])) == 1
        assert np.all(np.diff(times[there]) == 1)
        assert not np.any(np.diff(there.astype(int)) > 0)  # the padding is at the end
    with torch.no_grad():
        tensors = {key: torch.from_numpy(value) for key, value in sequences.items()}
        found, steps = forward_sequences(module, tensors)
    for key in ("action_dist_inputs", "vf_preds"):
        assert (found[key] - steps[key]).abs().max() <= 1e-6
    check_against_whole_episodes(batch, module)


def test_a_sequence_ends_where_steps_are_missing() -> None:
    runner = runner_of(LSTM, size=1, lengths=(9,))
    batch = runner.sample(9)[np.array([0, 1, 2, 5, 6, 8])]
    sequences = sequences_of(batch, ("t",), ["h", "c"], 10)
    assert [t[there].tolist() for t, there in zip(sequences["t"], sequences["mask"], strict=True)] == [
        [0, 1, 2], [5, 6], [8],
    ]  # fmt: skip
    assert np.array_equal(sequences["state_in_h"], batch["state_in_h"][[0, 3, 5]])


def test_nothing_before_an_episode_is_attended_to() -> None:
    module = ActorCriticModule(Waves.observation_space, Waves.action_space, ATTENTION)
    obs = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0))
    memory = torch.randn(2, 1, 6, 12, generator=torch.Generator().manual_seed(1))
    memory[1, :, -2:] = 0.5
    outputs = []
    for rubbish in (1.0, -7.0):
        given = memory.clone()
        given[0] *= rubbish
        given[1, :, :-2] *= rubbish
        state = {"memory": given, "length": torch.tensor([0, 2])}
        outputs.append(module.forward_train({"obs": obs, "state_in": state})["vf_preds"])
    assert torch.equal(*outputs)
    state = {"memory": memory, "length": torch.tensor([0, 6])}  # and what an episode has seen is
    assert not torch.equal(module.forward_train({"obs": obs, "state_in": state})["vf_preds"][1], outputs[0][1])


@pytest.mark.parametrize("kind", [PPOLearner, ActorCriticLearner])
@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_masked_places_change_nothing(name: str, kind: Any) -> None:
    runner = runner_of(MODELS[name], lengths=(3, 11, 2))
    module = runner.policy.module  # type: ignore[attr-defined]
    config = {**PPOConfig().to_dict(), "kl_coeff": 0.1, "entropy_coeff": 0.1, "num_epochs": 1}
    learner = kind(module, config)
    tensors = learner.tensors_of(runner.sample(60))
    mask = tensors["mask"]
    assert not mask.all()
    poisoned = {}
    for key, value in tensors.items():
        poisoned[key] = value.clone()
        if key != "mask" and not key.startswith("state_in"):
            poisoned[key][~mask] = torch.nan if value.is_floating_point() else 99
    assert_same_gradients(learner, module, tensors, poisoned)


def test_the_loss_of_sequences_is_that_of_their_rows() -> None:
    """With a memory that gives nothing, sequences are only another order of the rows."""
    runner = runner_of(LSTM, lengths=(3, 11, 2))
    module = runner.policy.module  # type: ignore[attr-defined]
    batch = runner.sample(60)
    learner = PPOLearner(module, PPOConfig().to_dict())
    outputs, rows = learner.forward(learner.tensors_of(batch))
    assert len(outputs["vf_preds"]) == 60
    for name in learner.wants:
        assert np.array_equal(rows[name].numpy(), batch[name])
    assert np.abs(outputs["vf_preds"].detach().numpy() - batch["vf_preds"]).max() <= 1e-6
    assert np.abs(outputs["action_dist_inputs"].detach().numpy() - batch["action_dist_inputs"]).max() <= 1e-6


def test_minibatches_have_whole_sequences() -> None:
    seen: list[tuple[int, ...]] = []

    class Counting(PPOLearner):
        def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            seen.append((len(batch["mask"]), int(batch["mask"].sum())))
            return super().loss(batch)

    runner = runner_of(LSTM, lengths=(5,))
    learner = Counting(runner.policy.module, {**PPOConfig().to_dict(), "minibatch_size": 30, "num_epochs": 2})  # type: ignore[attr-defined]
    learner.update(runner.sample(60))
    assert seen == [(6, 30)] * 4
    assert learner.steps == 60
    seen.clear()
    learner = Counting(learner.module, {**learner.config, "minibatch_size": 1, "num_epochs": 1})
    learner.update(runner.sample(60))
    assert seen == [(1, 5)] * 12  # a minibatch has at least one sequence


@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_the_state_before_each_step_is_in_the_batch(name: str) -> None:
    runner = runner_of(MODELS[name], lengths=(4, 7))
    module = runner.policy.module  # type: ignore[attr-defined]
    batch: SampleBatch = SampleBatch.concat_samples([runner.sample(12), runner.sample(30)])
    states = [key for key in batch if key.startswith("state_in_")]
    assert sorted(states) == sorted(f"state_in_{key}" for key in module.get_initial_state())
    starts = batch["t"] == 0
    for key in states:
        assert not batch[key][starts].any()
        assert all(row.any() for row in batch[key][~starts])
    rows = {key: torch.from_numpy(batch[f"state_in_{key}"]) for key in module.get_initial_state()}
    with torch.no_grad():
        found = module.forward_train({"obs": torch.from_numpy(batch["obs"])[:, None], "state_in": rows})
    assert np.abs(found["vf_preds"][:, 0].numpy() - batch["vf_preds"]).max() <= 1e-6


def small(config: Any, model: dict[str, Any]) -> Any:
    config = config.environment(lambda context: Cue()).debugging(seed=2).env_runners(num_envs_per_env_runner=3)
    return config.rl_module(model_config=model).training(train_batch_size=48)


@pytest.mark.parametrize("config", [PPOConfig().training(minibatch_size=16, num_epochs=2), PGConfig(), A2CConfig()])
@pytest.mark.parametrize("model", [LSTM, ATTENTION], ids=["lstm", "attention"])
def test_a_restored_run_goes_on_exactly(tmp_path: Path, config: Any, model: dict[str, Any]) -> None:
    """13 steps of each environment, and 26, end in the middle of an episode of four steps."""
    config = small(config.copy(), model).training(train_batch_size=39).reporting(min_env_steps_per_iteration=0)
    with config.build() as whole:
        results = [whole.train() for _ in range(4)]
        expected = whole.get_weights()["default_policy"]
    with config.build() as first:
        first.train()
        first.train()
        first.save(tmp_path / "one")
    with Algorithm.from_checkpoint(tmp_path / "one") as second:
        runner = second.env_runner
        assert any(state.any() for state in runner._states.values())
        second.train()
        result = second.train()
        weights = second.get_weights()["default_policy"]
    for name, value in expected.items():
        assert np.array_equal(value, weights[name]), name
    assert result["learners"] == results[-1]["learners"]


def test_evaluation_and_single_actions_keep_the_state() -> None:
    config = small(PPOConfig(), LSTM).training(minibatch_size=16)
    with config.evaluation(evaluation_duration=4).build() as algorithm:
        algorithm.train()
        assert algorithm.evaluate()["env_runners"]["num_episodes"] == 4
        obs = np.array([[1, 0], [0, 0], [0, 1]], np.float32)
        policy, module = algorithm.get_policy(), algorithm.get_module()
        state: Any = None
        many: Any = {}
        values = []
        for row in obs:
            action, state, _ = algorithm.compute_single_action(row, state, explore=False)
            actions, many, extra = policy.compute_actions(np.stack([row, row]), many, explore=False)
            assert actions.tolist() == [action, action]
            assert np.abs(many["c"] - state["c"]).max() <= 1e-6
            values.append(extra["vf_preds"][1])
        assert np.abs(unrolled(module, obs)["vf_preds"] - values).max() <= 1e-6


class Own(RLModule):
    """A running mean of observations as its memory; the runner gets no values from it."""

    known_settings = {"max_seq_len": 4}  # noqa: RUF012

    def setup(self) -> None:
        self.distribution = distribution_of(self.action_space)
        self.policy, self.value = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        return {"sum": torch.zeros(2)}

    def forward_train(self, batch: Any) -> dict[str, Any]:
        sums = batch["state_in"]["sum"][:, None] + batch["obs"].cumsum(1)
        return {
            "action_dist_inputs": self.policy(sums), "vf_preds": self.value(sums).squeeze(-1),
            "state_out": {"sum": sums[:, -1]},
        }  # fmt: skip

    def forward_exploration(self, batch: Any) -> dict[str, Any]:
        return {key: value for key, value in self.forward_train(batch).items() if key != "vf_preds"}


def test_a_module_of_ones_own_may_have_memory() -> None:
    config = {"estimate_advantages": True, "gamma": GAMMA, "lambda_": 0.0, "module_class": Own}
    runner = EnvRunner(lambda context: Waves(lengths=(3, 11)), ModulePolicy, policy_config=config, num_envs=2, seed=1)
    batch: SampleBatch = SampleBatch.concat_samples([runner.sample(10), runner.sample(24)])
    assert check_against_whole_episodes(batch, runner.policy.module) == 34  # type: ignore[attr-defined]
    with small(PPOConfig(), {}).rl_module(module_class=Own).training(minibatch_size=16).build() as algorithm:
        assert np.isfinite(algorithm.train()["learners"]["default_policy"]["learner_stats"]["total_loss"])


def test_runners_that_keep_no_states_refuse_memory() -> None:
    policy = runner_of(LSTM).policy
    with pytest.raises(
        UsageError, match="ModulePolicy has memory, and this kind of runner does not keep its state between"
    ):
        policy.explorer(1, 1, explore=True).act(0, np.zeros((1, 2), np.float32))


class Plain(Learner):
    """A loss that knows no sequences."""

    wants = ("obs",)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"use_lstm": True, "use_attention": True}, "exclude each other"),
        ({"use_lsmt": True}, "Did you mean 'use_lstm'"),
        ({"use_lstm": True, "lstm_cell_size": 0}, "lstm_cell_size: a whole number between 1 and 1000000, not 0"),
        ({"use_attention": True, "attention_dim": 1.5}, "attention_dim: a whole number"),
        ({"use_lstm": True, "max_seq_len": 0}, "max_seq_len: a whole number"),
        ({"use_attention": True, "attention_memory_training": 4}, "must be equal"),
        ({"use_lstm": True, "lstm_use_prev_action": True}, "a wrapper of the environment"),
        ({"use_lstm": True, "vf_share_layers": False}, "share the encoder and the memory"),
    ],
)
def test_wrong_settings_are_refused(model: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        small(PPOConfig(), model).training(minibatch_size=16).build()


def test_learners_without_sequences_refuse_memory() -> None:
    space = gym.spaces.Box(-1, 1, (2,), np.float32)
    with pytest.raises(UsageError, match=r"Plain cannot train a module with memory"):
        Plain(ActorCriticModule(space, gym.spaces.Discrete(2), LSTM), {})
    with pytest.raises(UsageError, match=r"Plain cannot train a module with memory"):
        ModulePolicy(space, gym.spaces.Discrete(2), {"model_config": LSTM, "learner_class": Plain})
    learner = PPOLearner(ActorCriticModule(space, gym.spaces.Discrete(2), LSTM), PPOConfig().to_dict())
    with pytest.raises(UsageError, match="needs the column 'action_logp'"):
        learner.tensors_of(SampleBatch(obs=np.zeros((3, 2), np.float32), actions=np.zeros(3, int)))


class Counting(Policy):
    """Acts at random; its state is the number of steps of the episode, and a decoy."""

    def get_initial_state(self) -> Any:
        state = [np.int64(0), np.full(2, 5.0)]
        return state if self.config.get("listed") else {"steps": state[0], "decoy": state[1]}

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        steps, decoy = state_batches if self.config.get("listed") else state_batches.values()
        assert (decoy == 5).all()
        after = [steps + 1, decoy]
        actions = self.rng.integers(2, size=len(obs_batch))
        return actions, after if self.config.get("listed") else dict(zip(("steps", "decoy"), after, strict=True)), {}


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_runners_keep_the_state_of_any_policy(mode: AutoresetMode | None, listed: bool) -> None:
    def creator(context: Any) -> Any:
        return Waves() if mode is None else SyncVectorEnv([Waves] * 2, autoreset_mode=mode)

    runner = EnvRunner(creator, Counting, policy_config={"listed": listed}, num_envs=2)
    for steps in (8, 2, 30):
        batch = runner.sample(steps)
        assert np.array_equal(batch["state_in_0" if listed else "state_in_steps"], batch["t"])


@pytest.mark.parametrize("listed", [True, False])
def test_single_actions_of_any_policy_have_their_state(listed: bool) -> None:
    policy = Counting(Waves.observation_space, Waves.action_space, {"listed": listed})
    state: Any = None
    for step in range(1, 4):
        action, state, _ = policy.compute_single_action(np.zeros(2, np.float32), state)
        assert action in (0, 1)
        assert (state[0] if listed else state["steps"]) == step


def test_a_broken_environment_begins_with_the_initial_state() -> None:
    runner = EnvRunner(lambda context: Waves(fails=(1, 2)), Counting, policy_config={"listed": True}, num_envs=2)
    batch = runner.sample(40)
    assert runner.take_stats().cut > 0
    assert np.array_equal(batch["state_in_0"], batch["t"])


class Stateful(Policy):
    """Returns a state that runners do not know of, or one of another shape."""

    def get_initial_state(self) -> Any:
        return self.config.get("initial", {})

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        return np.zeros(len(obs_batch), int), [np.zeros((len(obs_batch), 3))], {}


def test_states_of_another_form_are_refused() -> None:
    with pytest.raises(UsageError, match=r"Stateful returned the states \['0'\], and its get_initial_state has \[\]"):
        EnvRunner(lambda context: Waves(), Stateful).sample(3)
    config = {"initial": [np.zeros(2)]}
    with pytest.raises(UsageError, match=r"state '0' of shape \(1, 3\); it must be \(1, 2\)"):
        EnvRunner(lambda context: Waves(), Stateful, policy_config=config).sample(3)
