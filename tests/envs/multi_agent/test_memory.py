"""Policies with memory: each agent has its own state, in any order of turns, over edges of batches and of episodes."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import (
    AlgorithmConfig,
    DQNConfig,
    IMPALAConfig,
    ModulePolicy,
    MultiAgentBatch,
    MultiAgentEnvRunner,
    Policy,
    PolicySpec,
    PPOConfig,
)
from rlmesh.envs.learners.impala import AFTER, ENDS, IMPALALearner
from rlmesh.errors import UsageError

from ..recurrent.tasks import GAMMA, LSTM, MODELS, Exact, check_against_whole_episodes, unrolled
from .environments import Event, Scripted, Turns
from .test_learning import trained
from .test_trajectories import ALTERNATING, scripts

AGENTS = ("a", "b", "c")


class Swaying(Scripted):
    """`Scripted` with observations between -1 and 1 that differ from agent to agent, and from step to step."""

    def _observe(self, agents: tuple[str, ...]) -> dict[str, np.ndarray]:
        at = {agent: 3.1 * self.episode + 1.7 * self.at + 0.9 * AGENTS.index(agent) for agent in agents}
        return {agent: np.array([np.sin(x), np.cos(1.3 * x)], np.float32) for agent, x in at.items()}


def runner_of(episodes: list[list[Event]], model: dict[str, Any], **more: Any) -> MultiAgentEnvRunner:
    config = {
        "estimate_advantages": True, "gamma": GAMMA, "lambda_": 0.0, "model_config": model, "module_class": Exact,
    }  # fmt: skip
    fails = more.pop("fails", None)
    made: list[Scripted] = []

    def creator(context: Any) -> Scripted:
        made.append(Swaying(episodes, fails if not made else None))
        return made[-1]

    more.setdefault("policies", {"even", "odd"})
    more.setdefault("policy_mapping_fn", lambda agent_id, episode: "odd" if agent_id == "b" else "even")
    return MultiAgentEnvRunner(creator, ModulePolicy, policy_config=config, seed=2, **more)


@pytest.mark.case("O26")
@settings(max_examples=25, deadline=None)
@given(
    episodes=st.lists(scripts(), min_size=1, max_size=3), fragments=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    number=st.integers(1, 2), name=st.sampled_from(sorted(MODELS)), longest=st.integers(1, 5),
    fails=st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 3))),
)  # fmt: skip
def test_states_and_values_are_those_of_whole_trajectories(
    episodes: list[list[Event]], fragments: list[int], number: int, name: str, longest: int,
    fails: tuple[int, int] | None,
) -> None:  # fmt: skip
    """Any order of turns, agents that come and go, ends of all kinds, environments that break."""
    runner = runner_of(episodes, {**MODELS[name], "max_seq_len": longest}, num_envs=number, fails=fails)
    batches = [runner.sample(steps * number) for steps in [*fragments, 12]]
    for batch in batches:
        for part in batch.policy_batches.values():
            for trajectory in part.split_by_episode():
                for state in (key for key in trajectory if key.startswith("state_in")):
                    assert not trajectory[state][trajectory["t"] == 0].any()  # each begins with the initial state
    joined = MultiAgentBatch.concat_samples(batches)
    for policy_id, part in joined.policy_batches.items():
        module: Any = runner.get_policy(policy_id).module  # type: ignore[attr-defined]
        order = np.lexsort((part["t"], part["eps_id"]))
        assert check_against_whole_episodes(part[order], module, 1e-9) == len(part)
        learner = IMPALALearner(module, {**IMPALAConfig().to_dict(), "gamma": GAMMA})
        tensors = learner.tensors_of(part)
        with torch.no_grad():
            outputs = learner.outputs_of(module, tensors)
            logp = module.distribution.log_prob(outputs["action_dist_inputs"], tensors["actions"])
        assert np.abs(logp.numpy() - part["action_logp"]).max() <= 1e-5
        assert np.abs(outputs["vf_preds"].numpy() - part["vf_preds"]).max() <= 1e-9
        for row, value in zip(tensors[ENDS].tolist(), outputs[AFTER].tolist(), strict=True):
            own = part[order][part["eps_id"][order] == part["eps_id"][row]]
            obs = np.concatenate([own["obs"][: part["t"][row] + 1], part["new_obs"][row : row + 1]])
            assert abs(unrolled(module, obs)["vf_preds"][-1] - value) <= 1e-9


def test_a_restored_runner_goes_on_with_the_states() -> None:
    script = [*ALTERNATING[:3], *[Event(("a", "b"), {"a": 1.0, "b": 2.0})] * 9, ALTERNATING[-1]]
    one, other = (runner_of([script], LSTM, num_envs=2) for _ in range(2))
    one.sample(10)
    other.sample(4)
    other.set_state(cloudpickle.loads(cloudpickle.dumps(one.get_state())))
    for _ in range(3):
        expected, found = one.sample(12), other.sample(12)
        for name, part in expected.policy_batches.items():
            for column in part.keys() - {"infos"}:
                assert np.array_equal(part[column], found[name][column]), (name, column)


def turns(config: AlgorithmConfig, **policies: Any) -> Any:
    """The settings for `Turns`, whose largest return is 2, and whose return without memory is 0."""
    config.environment(Turns).rl_module(model_config={**LSTM, "lstm_cell_size": 16, "max_seq_len": 8})
    config.multi_agent(policies=policies, policy_mapping_fn=lambda agent_id, episode: agent_id)
    return config.env_runners(num_envs_per_env_runner=8).evaluation(evaluation_duration=200).debugging(seed=0)


def ppo() -> Any:
    return PPOConfig().training(train_batch_size=512, minibatch_size=128, num_epochs=4, lr=5e-3)


def dqn() -> Any:
    config = DQNConfig().training(
        replay_buffer_config={"type": "SequenceReplayBuffer", "capacity": 4000, "replay_burn_in": 2}, n_step=2,
        train_batch_size=160, num_steps_sampled_before_learning_starts=500, lr=3e-3,
        epsilon=[[0, 1.0], [2000, 0.05]], target_network_update_freq=40,
    )  # fmt: skip
    return config.env_runners(rollout_fragment_length=1)


@pytest.mark.slow
def test_agents_remember_their_own_cues() -> None:
    assert trained(turns(ppo(), left=None, right=None), 1.9, 25) >= 1.9


@pytest.mark.slow
def test_dqn_remembers_with_a_buffer_for_each_policy() -> None:
    assert trained(turns(dqn(), left=None, right=None), 1.9, 12) >= 1.9


@pytest.mark.slow
def test_remote_runners_and_several_learners_have_memory_together() -> None:
    config = IMPALAConfig().training(train_batch_size=256, lr=5e-3).reporting(min_env_steps_per_iteration=1000)
    config = turns(config, left=None, right=None).env_runners(num_env_runners=2, rollout_fragment_length=10)
    assert trained(config.learners(num_learners=2), 1.9, 40) >= 1.8  # runs differ from each other


def test_buffers_of_policies_have_their_own_sequences() -> None:
    config = turns(dqn(), left=None, right=PolicySpec(config={"model_config": {**LSTM, "max_seq_len": 3}}))
    config.training(num_steps_sampled_before_learning_starts=100).reporting(min_env_steps_per_iteration=200)
    with config.build() as algorithm:
        stats = algorithm.train()["learners"]
        assert all(np.isfinite(stats[name]["learner_stats"]["total_loss"]) for name in ("left", "right"))
        drawn = algorithm.replay.sample(40)
        algorithm.replay.restore(algorithm.replay.state())
        assert algorithm.replay.sample(4).keys() == drawn.keys()
        action, state, _ = algorithm.compute_single_action(np.zeros(2, np.float32), policy_id="right")
        _, later, _ = algorithm.compute_single_action(np.zeros(2, np.float32), state, policy_id="right")
        assert action in (0, 1)
        assert not np.array_equal(state["h"], later["h"])
    for name, length, width in (("left", 8, 16), ("right", 3, 12)):
        batch = drawn[name]
        assert batch["obs"].shape == (40, length + 2, 2)
        assert batch["state_in_h"].shape == (40, width)
        assert (np.diff(batch["t"], axis=1)[batch["mask"][:, 1:]] == 1).all()
        begins = batch["t"][:, 0] == 0
        assert not batch["state_in_h"][begins].any()
        assert batch["state_in_h"][~begins].any(1).all()


class Counter(Policy):
    """Acts by its state, the number of its agent's actions in the episode."""

    def get_initial_state(self) -> Any:
        return [np.int64(0)]

    def compute_actions(self, obs_batch: Any, state_batches: Any = None, **more: Any) -> Any:
        return state_batches[0] % 2, [state_batches[0] + 1], {}


def test_policies_with_and_without_memory_play_together() -> None:
    runner = runner_of([ALTERNATING], {}, policies={"even": Counter, "odd": PolicySpec(config={"model_config": LSTM})},
                       num_envs=3)  # fmt: skip
    batch = MultiAgentBatch.concat_samples([runner.sample(9), runner.sample(15)])
    assert np.array_equal(batch["even"]["state_in_0"], batch["even"]["t"])
    assert {"state_in_h", "state_in_c"} <= set(batch["odd"])


def test_single_actions_have_their_state() -> None:
    runner = runner_of([ALTERNATING], LSTM, policies={"even": Counter, "odd": None})
    state: Any = None
    for step in range(3):
        actions, state = runner.actions_and_states({0: np.zeros(2, np.float32)}, "even", state, explore=False)
        assert (actions[0], state["0"]) == (step % 2, step + 1)
    with pytest.raises(UsageError, match="a policy with memory acts for one observation at a time"):
        runner.actions_and_states({"a": np.zeros(2), "b": np.zeros(2)}, explore=False)
