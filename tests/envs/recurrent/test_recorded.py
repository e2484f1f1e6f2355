"""BC and MARWIL with memory: states of recorded episodes, sequences of updates, and a task that needs the past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.envs import Algorithm, BCConfig, EnvRunner, MARWILConfig, Policy, SampleBatch
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.envs.learners.marwil import MARWILLearner
from rlmesh.envs.offline.recorded_sequences import RecordedSequences
from rlmesh.envs.offline.recorded_steps import RecordedPart, RecordedSteps
from rlmesh.errors import UsageError

from .tasks import LSTM, MODELS, Cue, Exact, Waves
from .test_off_policy import BOUND, WITH_ATTENTION, WITH_LSTM

LENGTHS = (3, 1, 12, 8, 4, 9)
TERMINATED = (True, False, False, True, False, True)


def data_of(lengths: tuple[int, ...] = LENGTHS, terminated: tuple[bool, ...] = TERMINATED) -> RecordedSteps:
    random = np.random.default_rng(0)
    parts = [
        RecordedPart(
            f"part {i}", random.uniform(-1, 1, (length + 1, 2)).astype(np.float32), random.integers(2, size=length),
            random.normal(size=length), end,
        )
        for i, (length, end) in enumerate(zip(lengths, terminated, strict=True))
    ]  # fmt: skip
    return RecordedSteps(parts, ObservationRows(Waves.observation_space), Waves.action_space)


def module_of(name: str) -> Exact:
    torch.manual_seed(0)
    return Exact(Waves.observation_space, Waves.action_space, MODELS[name])


def one_by_one(module: Any, obs: np.ndarray) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """The states before the observations of an episode, and their values, by single steps."""
    states: Any = {name: each[None] for name, each in module.get_initial_state().items()}
    before, values = [], []
    with torch.no_grad():
        for row in torch.from_numpy(obs):
            before.append({name: each[0].numpy() for name, each in states.items()})
            outputs = module.forward_train({"obs": row[None, None], "state_in": states})
            values.append(float(outputs["vf_preds"]))
            states = outputs["state_out"]
    return before, values


@pytest.mark.parametrize("longest", [1, 4, 5, 50])
@pytest.mark.parametrize("name", MODELS)
def test_states_and_values_are_those_of_single_steps(name: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmesh.envs.offline.recorded_sequences.ROWS", 3 * longest)  # several passes of three parts
    data, module = data_of(), module_of(name)
    sequences = RecordedSequences(data, longest)
    assert len(sequences) == sum(-(-length // longest) for length in LENGTHS)
    states, last = sequences.look(module, np.arange(len(sequences)), values=True)
    number = 0
    for i, part in enumerate(data.parts):
        before, values = one_by_one(module, part.observations)
        for start in range(0, len(part), longest):
            assert sequences.part[number] == i
            assert sequences.lengths[number] == min(longest, len(part) - start)
            for key, each in states.items():
                assert np.abs(each[number] - before[start][key]).max(initial=0) <= BOUND
            number += 1
        assert last[i] == pytest.approx(values[len(part)], abs=1e-6)  # kept in float32, as all values are


def test_only_parts_that_are_drawn_are_passed_over() -> None:
    sequences, module = RecordedSequences(data_of(), 4), module_of("lstm")
    states, last = sequences.look(module, np.flatnonzero(sequences.part == 2), values=True)
    assert [bool(each) for each in last] == [False, False, True, False, False, False]
    assert set(sequences.part[np.flatnonzero(states["h"].any(1))]) == {2}
    assert not sequences.look(module, np.arange(len(sequences)), values=False)[1].any()


def test_a_part_without_its_last_observation_has_states_too() -> None:
    whole = data_of()
    cut = RecordedPart("cut", whole.parts[2].observations[:-1], whole.parts[2].actions, whole.parts[2].rewards, True)
    data = RecordedSteps([cut], ObservationRows(Waves.observation_space), Waves.action_space)
    states, last = RecordedSequences(data, 4).look(module_of("lstm"), np.arange(3), values=True)
    before, _ = one_by_one(module_of("lstm"), cut.observations)
    assert np.abs(states["c"] - np.stack([before[t]["c"] for t in (0, 4, 8)])).max() <= BOUND
    assert last.tolist() == [0]


@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_losses_and_gradients_are_those_of_single_steps(name: str, beta: float) -> None:
    """Sequences in any order, one of them twice, against a loop over the steps of each sequence."""
    data, module = data_of(), module_of(name)
    sequences = RecordedSequences(data, 5)
    config = {**MARWILConfig().policy_config(), "beta": beta, "moving_average_sqd_adv_norm_update_rate": 0.0}
    learner = MARWILLearner(module, config)
    drawn = np.array([4, 0, 1, 1, 6, 3])
    states, _ = sequences.look(module, drawn, values=False)
    batch = sequences.batch(drawn, states)
    batch["value_targets"] = np.random.default_rng(1).normal(size=len(batch)).astype(np.float32)
    assert len(batch) == sequences.lengths[drawn].sum()
    loss, _ = learner.loss(learner.tensors_of(batch))
    terms, row = [], 0
    for i in drawn:
        state: Any = {key: torch.from_numpy(each[i : i + 1]) for key, each in states.items()}
        for t in sequences.rows(np.array([i])):
            given = {"obs": torch.from_numpy(data.batch["obs"][t : t + 1][None]), "state_in": state}
            outputs = module.forward_train(given)
            state = outputs["state_out"]
            action = torch.from_numpy(data.batch["actions"][t : t + 1])
            logp = module.distribution.log_prob(outputs["action_dist_inputs"][0], action)
            advantage = torch.from_numpy(batch["value_targets"])[row] - outputs["vf_preds"][0, 0]
            weight = torch.exp(beta * advantage.detach() / (1e-8 + 10.0))
            terms.append(-weight * logp[0] + (0.5 * advantage.square() if beta else 0.0))
            row += 1
    expected = torch.stack(terms).mean()
    assert (loss - expected).abs().item() <= BOUND
    parameters = list(module.parameters())
    pairs: Any = zip(
        torch.autograd.grad(loss, parameters, allow_unused=True),
        torch.autograd.grad(expected, parameters, allow_unused=True), strict=True,
    )  # fmt: skip
    compared = [(one - other).abs().max() for one, other in pairs if one is not None and other is not None]
    assert len(compared) >= len(parameters) - 4  # the value head has no gradient with beta=0
    assert max(compared) <= BOUND


class Knows(Policy):
    """Answers `Cue` with the cue that it has seen, or at random with probability ``config["noise"]``."""

    def get_initial_state(self) -> Any:
        return {"cue": np.float32(0)}

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        cue = np.where(obs_batch[:, 0] != 0, obs_batch[:, 0], state_batches["cue"])
        anything = self.rng.random(len(cue)) < self.config.get("noise", 0.0)
        return np.where(anything, self.rng.integers(2, size=len(cue)), cue > 0).astype(np.int64), {"cue": cue}, {}


def recorded(noise: float, episodes: int = 400) -> SampleBatch:
    config = {"noise": noise}
    runner = EnvRunner(lambda context: Cue(), Knows, policy_config=config, num_envs=4, seed=0, infos=False)
    return runner.sample(num_episodes=episodes)


def config_of(kind: Any, model: dict[str, Any], seed: int = 0, episodes: int = 400) -> Any:
    """Sequences of three steps: the cue is in the first one of an episode, the answer in the second one."""
    source = recorded(0.0 if kind is BCConfig else 1.0, episodes)
    config = kind().environment(lambda context: Cue()).offline_data(input_=source).debugging(seed=seed)
    config.training(train_batch_size=128, lr=5e-3).evaluation(evaluation_duration=200)
    if kind is MARWILConfig:
        config.training(beta=3.0, moving_average_sqd_adv_norm_start=1.0, gamma=0.9)
    return config.rl_module(model_config=model)


@pytest.mark.parametrize(
    "model", [WITH_LSTM, pytest.param(WITH_ATTENTION, marks=pytest.mark.slow)], ids=["lstm", "attention"]
)
@pytest.mark.parametrize("kind", [BCConfig, MARWILConfig])
def test_memory_solves_the_task(kind: Any, model: dict[str, Any]) -> None:
    """The steps of MARWIL are of a policy that answers at random: it learns from their returns."""
    found = 0.0
    with config_of(kind, {**model, "max_seq_len": 3}).build() as algorithm:
        for _ in range(12):
            algorithm.train()
            if (found := algorithm.evaluate()["episode_reward_mean"]) >= 0.95:
                return
    raise AssertionError(f"the return was {found} in the end")


@pytest.mark.parametrize("kind", [BCConfig, MARWILConfig])
def test_without_memory_the_task_stays_at_chance(kind: Any) -> None:
    with config_of(kind, {"fcnet_hiddens": (32,)}).evaluation(evaluation_duration=1000).build() as algorithm:
        for _ in range(10):
            algorithm.train()
        assert abs(algorithm.evaluate()["episode_reward_mean"]) <= 0.15  # 0, with a deviation of 0.03


@pytest.mark.parametrize("kind", [BCConfig, MARWILConfig])
def test_a_restored_run_goes_on_exactly(kind: Any, tmp_path: Path) -> None:
    config = config_of(kind, {**WITH_LSTM, "max_seq_len": 3}, episodes=30).training(train_batch_size=20)
    config.offline_data(dataset_num_iters_per_learner=2)
    with config.build() as whole:
        results = [whole.train() for _ in range(4)]
        expected = whole.get_weights()["default_policy"]
    with config.build() as first:
        first.train()
        first.train()
        first.save(tmp_path / "checkpoint")
    with Algorithm.from_checkpoint(tmp_path / "checkpoint") as second:
        second.train()
        result = second.train()
        weights = second.get_weights()["default_policy"]
    assert all(np.array_equal(value, weights[name]) for name, value in expected.items())
    assert result["learners"] == results[-1]["learners"]


def test_each_sequence_comes_once_before_any_comes_again() -> None:
    with config_of(BCConfig, {**WITH_LSTM, "max_seq_len": 3}, episodes=25).build() as algorithm:
        sequences = algorithm.sequences
        assert sequences.lengths.tolist() == [3, 1] * 25
        seen: list[int] = []
        while len(seen) < 50:
            drawn = algorithm._next_units(20)
            assert 20 <= sequences.lengths[drawn].sum() <= 22
            seen += drawn.tolist()
        assert sorted(seen[:50]) == list(range(50))
        result = algorithm.train()
        assert result["info"]["num_env_steps_trained"] >= 100


def test_several_learners_share_sequences() -> None:
    with config_of(BCConfig, {**WITH_LSTM, "max_seq_len": 3}, episodes=25).build() as algorithm:
        states, _ = algorithm._estimates([np.arange(50)])
        batch = algorithm.sequences.batch(np.arange(50), states)
        learner = algorithm.get_policy().learner
        shares = learner.shares(batch, [0, int(learner.edges(batch)[21]), len(batch)])
        assert [len(part) for part, _ in shares] == [43, 57]
        assert [share.first for _, share in shares] == [0, 21]
        assert all(share.total == 50 for _, share in shares)


def test_marwil_with_memory_needs_the_last_observation_of_open_episodes() -> None:
    source = recorded(1.0, 4)
    cut = SampleBatch({name: source[name][:-1] for name in source if name not in ("new_obs", "terminateds")})
    cut["terminateds"] = np.zeros(len(cut), bool)
    with pytest.raises(UsageError, match="the observation after its last step is unknown"):
        config_of(MARWILConfig, {**LSTM}).offline_data(input_=cut).build()
    config_of(BCConfig, {**LSTM}).offline_data(input_=cut).build().stop()
