"""V-trace with memory: log-probabilities and values of sequences are those of whole episodes, at every edge."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import APPOConfig, EnvRunner, IMPALAConfig, ModulePolicy, SampleBatch
from rlmesh.envs.learners.impala import AFTER, ENDS, APPOLearner, IMPALALearner

from ..test_vtrace import Trajectory, twin
from .tasks import GAMMA, MODELS, Exact, Waves, assert_same_gradients, unrolled

SETTINGS = {**IMPALAConfig().to_dict(), "gamma": GAMMA}


def runner_of(model: dict[str, Any], mode: AutoresetMode | None = None, **env: Any) -> EnvRunner:
    config = {"model_config": model, "module_class": Exact}
    make = partial(Waves, **env)

    def creator(context: Any) -> Any:
        return make() if mode is None else SyncVectorEnv([make] * 2, autoreset_mode=mode)

    return EnvRunner(creator, ModulePolicy, policy_config=config, num_envs=2, seed=3)


def values_after(batch: SampleBatch, module: Any) -> np.ndarray:
    """The value after each row, from passes over whole episodes; 0 after a terminal step."""
    found = np.zeros(len(batch))
    for number in np.unique(batch["eps_id"]):
        rows = np.flatnonzero(batch["eps_id"] == number)
        assert batch["t"][rows].tolist() == list(range(len(rows)))
        obs = np.concatenate([batch["obs"][rows], batch["new_obs"][rows[-1:]]])
        found[rows] = unrolled(module, obs)["vf_preds"][1:]
    return np.where(batch["terminateds"], 0.0, found)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    truncated=st.lists(st.booleans(), min_size=4, max_size=4),
    fragments=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    longest=st.integers(1, 7),
    name=st.sampled_from(sorted(MODELS)),
    mixed=st.booleans(),
    mode=st.sampled_from([None, *AutoresetMode]),
    fails=st.one_of(st.none(), st.tuples(st.integers(0, 1), st.integers(1, 3))),
)
def test_sequences_give_the_log_probabilities_and_values_of_whole_episodes(
    lengths: list[int], truncated: list[bool], fragments: list[int], longest: int, name: str, mixed: bool,
    mode: AutoresetMode | None, fails: tuple[int, int] | None,
) -> None:  # fmt: skip
    """Fragments that end anywhere and arrive in another order, all kinds of ends, environments that break."""
    model, flags = {**MODELS[name], "max_seq_len": longest}, tuple(truncated[: len(lengths)])
    runner = runner_of(model, mode, lengths=tuple(lengths), truncated=flags, fails=None if mode else fails)
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    parts = [runner.sample(2 * steps) for steps in fragments]
    batch: SampleBatch = SampleBatch.concat_samples(parts[::-1] if mixed else parts)
    whole: SampleBatch = SampleBatch.concat_samples(parts)
    order = np.lexsort((whole["t"], whole["eps_id"]))
    after = dict(zip(_keys(whole[order]), values_after(whole[order], module), strict=True))
    learner = IMPALALearner(module, SETTINGS)
    tensors = learner.tensors_of(batch)
    assert tensors["mask"].shape[1] <= longest
    with torch.no_grad():
        outputs = learner.outputs_of(module, tensors)
        logp = module.distribution.log_prob(outputs["action_dist_inputs"], tensors["actions"])
        targets, advantages = learner.traced(tensors, logp, outputs["vf_preds"], outputs[AFTER])
    assert np.abs(logp.numpy() - batch["action_logp"]).max() <= 1e-5
    assert np.abs(outputs["vf_preds"].numpy() - batch["vf_preds"]).max() <= 1e-9
    ends = tensors[ENDS].numpy()
    expected = np.array([after[key] for key in _keys(batch)])
    assert np.abs(outputs[AFTER].numpy() - expected[ends]).max(initial=0) <= 1e-9
    # The sampling policy learns, so the ratios are 1: the targets are those of the paper's sums.
    bounds = [*learner.edges(batch).tolist(), len(batch)]
    ratios = logp.numpy() - batch["action_logp"]
    for start, end in pairwise(bounds):
        rows = slice(start, end)
        hand = Trajectory(ratios[rows], batch["rewards"][rows], batch["vf_preds"][rows], float(expected[end - 1]))
        wanted = twin(hand, GAMMA, 1.0, 1.0)
        assert np.abs(targets[rows].numpy() - wanted[0]).max() <= 1e-6
        assert np.abs(advantages[rows].numpy() - wanted[1]).max() <= 1e-6


def _keys(batch: SampleBatch) -> list[tuple[int, int]]:
    return list(zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True))


@pytest.mark.parametrize("kind", [IMPALALearner, APPOLearner])
@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_the_padding_changes_nothing(name: str, kind: Any) -> None:
    runner = runner_of(MODELS[name], lengths=(3, 11, 2), truncated=(False, True, True))
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    config = {**APPOConfig().policy_config(), "gamma": GAMMA, "use_kl_loss": True}
    learner = kind(module, config)
    tensors = learner.tensors_of(runner.sample(58))
    lengths = tensors["mask"].sum(1, keepdim=True)
    assert not tensors["mask"].all()
    poisoned = {**tensors, "obs": tensors["obs"].clone()}
    poisoned["obs"][torch.arange(tensors["obs"].shape[1]) > lengths] = torch.nan
    assert_same_gradients(learner, module, tensors, poisoned)


def test_values_at_the_edge_have_no_gradient() -> None:
    """The value after the last step is a target, as it is without memory."""
    runner = runner_of(MODELS["lstm"], lengths=(30,))
    module: Any = runner.policy.module  # type: ignore[attr-defined]
    learner = IMPALALearner(module, SETTINGS)
    outputs = learner.outputs_of(module, learner.tensors_of(runner.sample(14)))
    assert len(outputs[AFTER]) == 2
    assert not outputs[AFTER].requires_grad
    assert outputs["vf_preds"].requires_grad
