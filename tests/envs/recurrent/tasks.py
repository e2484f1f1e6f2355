"""Environments in which the past matters, and settings of small modules with memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlmesh.envs import ActorCriticModule, RLModule, SampleBatch

from ..environments import Count

GAMMA = 0.9

LSTM: dict[str, Any] = {"fcnet_hiddens": (8,), "use_lstm": True, "lstm_cell_size": 12, "max_seq_len": 5}
ATTENTION: dict[str, Any] = {
    "fcnet_hiddens": (8,), "use_attention": True, "attention_dim": 12, "attention_num_heads": 2,
    "attention_head_dim": 4, "attention_memory_inference": 6, "attention_memory_training": 6,
    "attention_position_wise_mlp_dim": 8, "max_seq_len": 5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "lstm": LSTM,
    "attention": ATTENTION,
    "attention over 2 units and 3 steps": {
        **ATTENTION, "attention_num_transformer_units": 2, "attention_memory_inference": 3,
        "attention_memory_training": 3,
    },
}  # fmt: skip


class ToDouble(torch.nn.Module):
    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return observations.double()


class Exact(ActorCriticModule):
    """The built-in module with memory in float64, so that results can be compared beyond rounding."""

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.encoder, torch.nn.Sequential)
        self.encoder[0] = ToDouble()  # instead of the layer that makes float32
        self.double()

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        states = super().get_initial_state()
        return {name: each.double() if each.is_floating_point() else each for name, each in states.items()}


class Waves(Count):
    """`Count` with observations between -1 and 1 that are all different."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def observe(self) -> np.ndarray:
        at = 3.0 * self.episode + 1.7 * self.at
        return np.array([np.sin(at), np.cos(1.3 * at)], np.float32)


class Cue(gym.Env[np.ndarray, Any]):
    """The first observation has a cue, +1 or -1; the action of the last step has to name it: return +1, otherwise -1.

    The last observation is the same for both cues. So a policy that is a function of the observation alone is right
    with probability 1/2, and its mean return is 0.

    Args:
        wait: steps between the cue and the answer.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, wait: int = 3) -> None:
        self.wait = wait

    def observe(self) -> np.ndarray:
        return np.array([self.cue if self.at == 0 else 0, self.at == self.wait], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.cue = 0, 2 * int(self.np_random.integers(2)) - 1
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        over = self.at == self.wait
        reward = float((2 * action - 1) * self.cue) if over else 0.0
        self.at += 1
        return self.observe(), reward, over, False, {}


def unrolled(module: RLModule, obs: np.ndarray) -> dict[str, np.ndarray]:
    """The results of a pass over one whole episode."""
    states = {name: state[None] for name, state in module.get_initial_state().items()}
    with torch.no_grad():
        outputs = module.forward_train({"obs": torch.from_numpy(obs)[None], "state_in": states})
    return {name: value[0].numpy() for name, value in outputs.items() if name != "state_out"}


def check_against_whole_episodes(batch: SampleBatch, module: RLModule, bound: float = 1e-6) -> int:
    """Compare what a runner computed step by step with passes over whole episodes; returns the number of rows.

    Args:
        bound: the largest difference of values; inputs of distributions are always kept in float32.
    """
    checked = 0
    batch = batch[np.argsort(batch["eps_id"], kind="stable")]
    for episode in batch.split_by_episode():
        assert episode["t"].tolist() == list(range(len(episode)))
        whole = unrolled(module, np.concatenate([episode["obs"], episode["new_obs"][-1:]]))
        assert np.abs(episode["action_dist_inputs"] - whole["action_dist_inputs"][:-1]).max() <= 1e-6
        assert np.abs(episode["vf_preds"] - whole["vf_preds"][:-1]).max() <= bound
        after = np.where(episode["terminateds"], 0, whole["vf_preds"][1:])
        assert np.abs(episode["value_targets"] - episode["rewards"] - GAMMA * after).max() <= 1e-5
        checked += len(episode)
    return checked


def assert_same_gradients(learner: Any, module: Any, *batches: dict[str, torch.Tensor]) -> None:
    """The loss of each batch has the same gradients, which are not all 0, and finite statistics."""
    gradients = []
    for batch in batches:
        module.zero_grad()
        loss, stats = learner.loss(batch)
        loss.backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]))
        assert all(value.isfinite() for value in stats.values())
    assert gradients[0].abs().sum() > 0
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
