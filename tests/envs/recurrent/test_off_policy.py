"""SAC and TD3 with memory: replayed sequences against single steps, in float64, and a task that needs the past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import DQNConfig, EnvRunner, SACConfig, SampleBatch, TD3Config
from rlmesh.envs.learners.recurrent.continuous import RecurrentSACLearner, RecurrentTD3Learner, transitions_of
from rlmesh.envs.learners.recurrent.dqn import RecurrentDQNLearner
from rlmesh.envs.learners.sac import SACLearner
from rlmesh.envs.modules.continuous import SACModule, TD3Module
from rlmesh.envs.modules.exploration import OffPolicyModulePolicy
from rlmesh.envs.modules.recurrent import RememberedFeatures
from rlmesh.envs.replay import SequenceReplayBuffer
from rlmesh.errors import UsageError

from ..multi_agent.environments import Turns
from .tasks import ATTENTION, LSTM, Cue, ToDouble, Waves

BOUND = 1e-9
MEMORIES = {"lstm": LSTM, "attention": ATTENTION}
SETTINGS: dict[str, Any] = {
    "lr": 1e-3, "gamma": 0.9, "grad_clip": None, "adam_epsilon": 1e-8, "seed": 1, "tau": 0.1, "initial_alpha": 0.3,
    "target_entropy": "auto", "num_steps_sampled_before_learning_starts": 0, "policy_delay": 1, "target_noise": 0.4,
    "target_noise_clip": 0.3, "exploration_noise": 0.1,
}  # fmt: skip


class Sway(Waves):
    """`Waves` with an action of two numbers."""

    action_space: Any = gym.spaces.Box(-2, 1, (2,), np.float32)


class Say(Cue):
    """`Cue` whose answer is a number: its product with the cue is the reward, so that constants get 0 on average."""

    action_space: Any = gym.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action: Any) -> Any:
        observation, _, over, truncated, info = super().step(0)
        return observation, float(action[0] * self.cue) if over else 0.0, over, truncated, info


class InDouble:
    """Makes a module of SAC or TD3 with memory one of float64."""

    def setup(self: Any) -> None:
        super().setup()  # type: ignore[misc]
        for part in (self.actor[0], self.critic.features):
            part.encoder[0] = ToDouble()
        self.double()

    def get_initial_state(self: Any) -> dict[str, torch.Tensor]:
        states = super().get_initial_state()  # type: ignore[misc]
        return {name: each.double() if each.is_floating_point() else each for name, each in states.items()}


class ExactSAC(InDouble, SACModule):
    pass


class ExactTD3(InDouble, TD3Module):
    pass


EXACT: dict[str, Any] = {"SAC": (ExactSAC, RecurrentSACLearner), "TD3": (ExactTD3, RecurrentTD3Learner)}


def runner_of(name: str, memory: str) -> EnvRunner:
    config = {"module_class": EXACT[name][0], "model_config": MEMORIES[memory], "seed": 2}
    env: dict[str, Any] = {"lengths": (3, 11, 2, 6), "truncated": (False, True, True, False)}
    return EnvRunner(lambda context: Sway(**env), OffPolicyModulePolicy, policy_config=config, num_envs=3, seed=3)


def replay_of(module: Any, batches: list[SampleBatch]) -> SequenceReplayBuffer:
    states = tuple(f"state_in_{name}" for name in module.get_initial_state())
    buffer = SequenceReplayBuffer(1000, length=4, burn_in=2, state_columns=states, seed=0)
    for batch in batches:
        buffer.add(batch)
    return buffer


def one_by_one(features: RememberedFeatures, obs: torch.Tensor, states: Any) -> torch.Tensor:
    """The features of one sequence, ``[time, size]``, by single steps that hand their state on."""
    found = []
    for row in obs:
        out, after = features.over(row[None, None], states)
        states = {**states, **after}
        found.append(out[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", EXACT)
def test_replayed_sequences_begin_with_the_recorded_state(name: str, memory: str) -> None:
    """It is the state that the runner had there, and that of a pass from the start of the episode."""
    runner = runner_of(name, memory)
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    batches = [runner.sample(steps) for steps in (9, 21, 3, 30)]
    rows: SampleBatch = SampleBatch.concat_samples(batches)
    replayed = replay_of(module, batches).sample(60)
    assert (replayed["t"][:, 0] > 0).any()
    for i in range(60):
        episode = rows[np.flatnonzero(rows["eps_id"] == replayed["eps_id"][i, 0])]
        episode = episode[np.argsort(episode["t"])]
        start = int(replayed["t"][i, 0])
        states: Any = {key: each[None] for key, each in module.get_initial_state().items()}
        with torch.no_grad():
            for row in torch.from_numpy(episode["obs"][:start]):
                states = module.forward_train({"obs": row[None, None], "state_in": states})["state_out"]
        for key, each in states.items():
            assert np.array_equal(replayed[f"state_in_{key}"][i], episode[f"state_in_{key}"][start])
            assert np.abs(replayed[f"state_in_{key}"][i] - each[0].numpy()).max() <= BOUND
        length = int(replayed["mask"][i].sum())
        assert np.array_equal(replayed["obs"][i, :length], episode["obs"][start : start + length])


@pytest.mark.parametrize(("n_step", "weighted"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", EXACT)
def test_losses_and_gradients_are_those_of_single_steps(name: str, memory: str, n_step: int, weighted: bool) -> None:
    """Passes over padded sequences, with rubbish in the padding, against a loop over the steps of each sequence."""
    runner = runner_of(name, memory)
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    learner = EXACT[name][1](module, {**SETTINGS, "n_step": n_step})
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = replay_of(module, [runner.sample(steps) for steps in (9, 21, 30)]).sample(20)
    batch["rewards"] = batch["rewards"].astype(np.float64) + 0.1
    if weighted:
        batch["weights"] = np.random.default_rng(0).random(20)
    assert not batch["mask"].all()
    assert not np.array_equal(batch["mask"], batch["learn_mask"])
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())
    expected = losses_by_hand(name, learner, batch, n_step, generator)
    for column in batch.values():
        if column.shape[:2] == batch["mask"].shape and column.dtype.kind == "f":
            column[~batch["mask"]] = np.nan
    found: dict[str, Any] = {}

    def descend(what: str, loss: torch.Tensor, optimizer: Any, parameters: Any) -> None:
        found[what] = [loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)]

    learner.descend = descend
    learner.update(batch)
    assert len(learner.td_errors) == batch["learn_mask"].sum()
    for what, (loss, parameters) in expected.items():
        wanted = [loss.detach(), *torch.autograd.grad(loss, parameters, retain_graph=True)]
        assert len(wanted) == len(found[what])
        assert any(gradient.abs().sum() > 1e-3 for gradient in wanted[1:])
        for one, other in zip(found[what], wanted, strict=True):
            assert (one - other).abs().max() <= BOUND, what


def losses_by_hand(
    name: str, learner: Any, batch: dict[str, np.ndarray], n_step: int, generator: torch.Generator
) -> dict[str, Any]:
    module, now, after, rest = learner.module, [], [], []
    alpha = float(learner.log_alpha.exp().detach()) if name == "SAC" else 0.0
    late_actor = module.actor if name == "SAC" else learner.target["actor"]
    late_critic = learner.target if name == "SAC" else learner.target["critic"]
    for i in range(len(batch["mask"])):
        length = int(batch["mask"][i].sum())
        obs = torch.from_numpy(np.concatenate([batch["obs"][i, :length], batch["new_obs"][i, length - 1 : length]]))
        states = {key[9:]: torch.from_numpy(value[i : i + 1]) for key, value in batch.items() if key[:9] == "state_in_"}
        actor, critic = (one_by_one(part, obs, states) for part in (module.actor[0], module.critic.features))
        with torch.no_grad():
            following, late = (one_by_one(part, obs, states) for part in (late_actor[0], late_critic.features))
        for t in np.flatnonzero(batch["learn_mask"][i]):
            k = min(n_step, length - int(t))
            reward = sum(0.9**j * batch["rewards"][i, t + j] for j in range(k))
            discount = 0.0 if batch["terminateds"][i, t + k - 1] else 0.9**k
            now.append((actor[t], critic[t]))
            after.append((following[t + k], late[t + k]))
            weight = float(batch["weights"][i]) if "weights" in batch else 1.0
            rest.append((torch.from_numpy(batch["actions"][i, t]), reward, discount, weight))
    actor, critic = (torch.stack(each) for each in zip(*now, strict=True))
    following, late = (torch.stack(each) for each in zip(*after, strict=True))
    actions = torch.stack([each[0] for each in rest])
    rewards, discounts, weights = (
        torch.tensor([each[place] for each in rest], dtype=torch.float64) for place in (1, 2, 3)
    )
    inputs = late_actor[-1](following)
    noise = torch.randn((len(inputs), 2), generator=generator)
    if name == "SAC":
        drawn, log_prob = module.distribution.rsample(inputs, noise)
        values = late_critic.of_features(late, drawn).amin(0) - alpha * log_prob
    else:
        noise = (0.4 * noise).clamp(-0.3, 0.3)
        values = late_critic.of_features(late, (torch.tanh(inputs) + noise).clamp(-1, 1)).amin(0)
    targets = (rewards + discounts * values).detach()
    squares = (weights * (module.critic.of_features(critic, actions) - targets).square()).mean(-1).sum()
    if name == "SAC":
        noise = torch.randn((len(actor), 2), generator=generator)
        drawn, log_prob = module.distribution.rsample(module.actor[-1](actor), noise)
        actor_loss = (alpha * log_prob - module.critic.of_features(critic.detach(), drawn).amin(0)).mean()
    else:
        actor_loss = -module.critic.of_features(critic.detach(), torch.tanh(module.actor[-1](actor)))[0].mean()
    return {
        "critic loss": (0.5 * squares if name == "SAC" else squares, list(module.critic.parameters())),
        "actor loss": (actor_loss, list(module.actor.parameters())),
    }  # fmt: skip


@pytest.mark.parametrize("memory", MEMORIES)
def test_values_of_sequences_are_those_of_single_steps(memory: str) -> None:
    module = ExactSAC(Sway.observation_space, Sway.action_space, MEMORIES[memory])
    obs = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states = {key: each.expand(2, *each.shape) for key, each in module.get_initial_state().items()}
    with torch.no_grad():
        values = module.compute_values({"obs": obs, "state_in": states})
        for t in range(5):
            step = {"obs": obs[:, t : t + 1], "state_in": states}
            assert (module.compute_values(step)[:, 0] - values[:, t]).abs().max() <= BOUND
            states = module.forward_train(step)["state_out"]


def test_sequences_that_end_within_their_burn_in_change_nothing() -> None:
    runner = runner_of("SAC", "lstm")
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    learner = RecurrentSACLearner(module, {**SETTINGS, "n_step": 1})
    batch = replay_of(module, [runner.sample(30)]).sample(5)
    batch["learn_mask"][:] = False
    before = [parameter.clone() for parameter in module.parameters()]
    assert learner.update(batch) == {"curr_lr": 1e-3}
    assert len(learner.td_errors) == 0
    assert all(map(torch.equal, before, module.parameters()))
    tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
    assert len(transitions_of(tensors, 3, 0.9)["rewards"]) == 0


def config_of(kind: Any, model: dict[str, Any], seed: int = 0, **training: Any) -> Any:
    config = kind().environment(lambda context: Say()).debugging(seed=seed).rl_module(model_config=model)
    buffer = {"type": "SequenceReplayBuffer", "capacity": 4000, "replay_burn_in": 2}
    config.training(replay_buffer_config=buffer, train_batch_size=160, gamma=0.9, tau=0.02)
    if kind is SACConfig:
        config.training(num_steps_sampled_before_learning_starts=500, lr=3e-3, initial_alpha=0.1)
    elif kind is TD3Config:
        config.training(num_steps_sampled_before_learning_starts=1000, lr=2e-3, exploration_noise=0.3)
    config.env_runners(num_envs_per_env_runner=8).reporting(min_env_steps_per_iteration=400)
    return config.training(**training).evaluation(evaluation_duration=100)


WITH_LSTM = {**LSTM, "fcnet_hiddens": (16,), "lstm_cell_size": 16}
WITH_ATTENTION = {**ATTENTION, "fcnet_hiddens": (16,), "attention_dim": 16}


def best_return(config: Any, steps: int, goal: float) -> float:
    """The best return of evaluations, which end at the goal."""
    best = -1.0
    with config.build() as algorithm:
        while algorithm.env_steps_sampled < steps and best < goal:
            algorithm.train()
            best = max(best, algorithm.evaluate()["episode_reward_mean"])
    return best


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (TD3Config, WITH_LSTM), pytest.param(SACConfig, WITH_LSTM, marks=pytest.mark.slow),
        pytest.param(SACConfig, WITH_ATTENTION, marks=pytest.mark.slow),
        pytest.param(TD3Config, WITH_ATTENTION, marks=pytest.mark.slow),
    ],
    ids=["TD3-lstm", "SAC-lstm", "SAC-attention", "TD3-attention"],
)  # fmt: skip
def test_memory_solves_the_task(kind: Any, model: dict[str, Any]) -> None:
    assert best_return(config_of(kind, model), 8000, 0.9) >= 0.9


@pytest.mark.parametrize("kind", [pytest.param(SACConfig, marks=pytest.mark.slow), TD3Config])
def test_without_memory_the_task_stays_at_chance(kind: Any) -> None:
    """A constant answer gets 0 plus noise: a standard deviation of 1 / sqrt(100) = 0.1 in each evaluation."""
    config = config_of(kind, {"fcnet_hiddens": (32,)}, replay_buffer_config={"type": "ReplayBuffer"})
    assert best_return(config, 4000, 0.5) < 0.5


@pytest.mark.slow
def test_dqn_with_attention_solves_the_task() -> None:
    config: Any = config_of(DQNConfig, WITH_ATTENTION, n_step=2, lr=3e-3, epsilon=[[0, 1.0], [2000, 0.05]],
                            target_network_update_freq=40, training_intensity=None, tau=1.0)  # fmt: skip
    config.environment(lambda context: Cue()).env_runners(rollout_fragment_length=1)
    with config.build() as algorithm:
        assert isinstance(algorithm.learner, RecurrentDQNLearner)
    assert best_return(config, 8000, 0.95) >= 0.95


@pytest.mark.parametrize("kind", [SACConfig, TD3Config])
def test_training_goes_on_exactly_after_a_restore(kind: Any, tmp_path: Path) -> None:
    config = config_of(kind, WITH_LSTM, num_steps_sampled_before_learning_starts=50)
    config.reporting(min_env_steps_per_iteration=104)  # 13 steps of each environment: within an episode of 4
    with config.build() as one, config.build() as other:
        one.train()
        one.save(tmp_path / "checkpoint")
        results = [one.train()]
        other.restore(tmp_path / "checkpoint")
        assert other.env_runner._states["critic_h"].any()
        results.append(other.train())
        ours, theirs = (algorithm.get_weights()["default_policy"] for algorithm in (one, other))
    assert all(np.array_equal(value, theirs[name]) for name, value in ours.items())
    assert results[0]["learners"] == results[1]["learners"]


def test_single_actions_need_and_give_the_state() -> None:
    with config_of(SACConfig, WITH_LSTM).build() as algorithm:
        algorithm.get_module().uniform.fill_(0.0)
        action, state, _ = algorithm.compute_single_action(np.array([1, 0], np.float32), explore=False)
        assert action.shape == (1,)
        assert set(state) == {"h", "c", "critic_h", "critic_c"}
        _, later, _ = algorithm.compute_single_action(np.zeros(2, np.float32), state, explore=False)
        _, fresh, _ = algorithm.compute_single_action(np.zeros(2, np.float32), explore=False)
        assert not np.allclose(later["h"], fresh["h"])


class SayInTurns(Turns):
    """`Turns` whose answers are numbers, as those of `Say`."""

    action_space: Any = gym.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, actions: Any) -> Any:
        return super().step({agent: (float(action[0]) + 1) / 2 for agent, action in actions.items()})


@pytest.mark.slow
def test_several_agents_have_a_buffer_of_sequences_for_each_policy() -> None:
    config = config_of(SACConfig, {**WITH_LSTM, "max_seq_len": 5}).environment(lambda context: SayInTurns())
    config.multi_agent(policies=["left", "right"])
    assert best_return(config, 12_000, 1.8) >= 1.8


@pytest.mark.parametrize("kind", [SACConfig, TD3Config])
def test_settings_that_do_not_fit_are_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match="belong together"):
        config_of(kind, WITH_ATTENTION, replay_buffer_config={"type": "ReplayBuffer"}).build()
    with pytest.raises(UsageError, match="belong together"):
        config_of(kind, {}).build()
    with pytest.raises(UsageError, match="exclude each other"):
        config_of(kind, {**WITH_LSTM, "use_attention": True}).build()
    with pytest.raises(UsageError, match="lstm_cell_size: a whole number between 1 and 1000000, not 0"):
        config_of(kind, {**WITH_LSTM, "lstm_cell_size": 0}).build()
    with pytest.raises(UsageError, match="Did you mean 'use_lstm'"):
        config_of(kind, {"use_lsmt": True}, replay_buffer_config={"type": "ReplayBuffer"}).build()


def test_learners_of_transitions_refuse_memory() -> None:
    with pytest.raises(UsageError, match="SACLearner cannot train a module with memory"):
        SACLearner(SACModule(Sway.observation_space, Sway.action_space, LSTM), SETTINGS)
