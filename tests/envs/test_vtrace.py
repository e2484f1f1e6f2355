"""V-trace: equal to the sums of the paper, at every kind of edge."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import EnvRunner, ModulePolicy, SampleBatch
from rlmesh.envs.batches.estimates import rows_that_go_on
from rlmesh.envs.learners.impala import IMPALALearner
from rlmesh.envs.learners.vtrace import discounted_sums, vtrace

from .environments import Count


class Trajectory(NamedTuple):
    log_ratios: np.ndarray
    rewards: np.ndarray
    values: np.ndarray
    bootstrap: float


def twin(
    trajectory: Trajectory, gamma: float, clip_rho: float | None, clip_pg_rho: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 of the paper, as it is written: a sum over the future with products of c."""
    ratios, rewards, values = np.exp(trajectory.log_ratios), trajectory.rewards, trajectory.values
    size = len(rewards)
    after = [*values[1:], trajectory.bootstrap]
    rho = [min(clip_rho or np.inf, ratio) for ratio in ratios]
    c = [min(1.0, ratio) for ratio in ratios]
    deltas = [rho[t] * (rewards[t] + gamma * after[t] - values[t]) for t in range(size)]
    targets = np.array([
        values[s] + sum(gamma ** (t - s) * float(np.prod(c[s:t])) * deltas[t] for t in range(s, size))
        for s in range(size)
    ])  # fmt: skip
    ahead = [*targets[1:], trajectory.bootstrap]
    limit = clip_pg_rho or np.inf
    advantages = [min(limit, ratios[s]) * (rewards[s] + gamma * ahead[s] - values[s]) for s in range(size)]
    return targets, np.array(advantages)


CLIPS = st.sampled_from([None, 0.5, 1.0, 3.0])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.sampled_from(["terminated", "truncated", "edge"])), min_size=1,
                     max_size=5),
    seed=st.integers(0, 1000), gamma=st.sampled_from([0.0, 0.9, 1.0]), clip_rho=CLIPS, clip_pg_rho=CLIPS,
)  # fmt: skip
def test_targets_and_advantages_are_those_of_the_paper(
    lengths: list[tuple[int, str]], seed: int, gamma: float, clip_rho: float | None, clip_pg_rho: float | None
) -> None:
    random = np.random.default_rng(seed)
    trajectories = [
        Trajectory(random.normal(size=n), random.normal(size=n), random.normal(size=n),
                   0.0 if end == "terminated" else float(random.normal()))
        for n, end in lengths
    ]  # fmt: skip
    expected = [twin(each, gamma, clip_rho, clip_pg_rho) for each in trajectories]
    columns = {
        "eps_id": np.repeat(np.arange(len(lengths)), [n for n, _ in lengths]),
        "t": np.concatenate([np.arange(n) + 3 for n, _ in lengths]),
        "terminateds": np.concatenate([(np.arange(n) == n - 1) & (end == "terminated") for n, end in lengths]),
        "truncateds": np.concatenate([(np.arange(n) == n - 1) & (end == "truncated") for n, end in lengths]),
    }
    goes_on = rows_that_go_on(columns)
    bootstraps = np.full(len(goes_on), np.nan)  # rows that go on must not read theirs
    bootstraps[~goes_on] = [each.bootstrap for each in trajectories]
    log_ratios, rewards, values = (
        torch.from_numpy(np.concatenate([getattr(each, name) for each in trajectories]))
        for name in ("log_ratios", "rewards", "values")
    )
    targets, advantages = vtrace(
        log_ratios, rewards, values, torch.from_numpy(bootstraps), torch.from_numpy(goes_on), gamma,
        clip_rho=clip_rho, clip_pg_rho=clip_pg_rho,
    )  # fmt: skip
    np.testing.assert_allclose(targets.numpy(), np.concatenate([t for t, _ in expected]), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(advantages.numpy(), np.concatenate([a for _, a in expected]), rtol=1e-9, atol=1e-9)


def test_on_policy_targets_are_returns() -> None:
    """With ratios of 1, the target of a value is the return of n steps (section 4.1 of the paper)."""
    rewards = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    values = torch.tensor([7.0, -3.0, 5.0], dtype=torch.float64)
    goes_on = torch.tensor([True, True, False])
    bootstraps = torch.full((3,), 8.0, dtype=torch.float64)
    targets, _ = vtrace(torch.zeros(3, dtype=torch.float64), rewards, values, bootstraps, goes_on, 0.5)
    assert targets.tolist() == [1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 8, 2 + 0.5 * 4 + 0.25 * 8, 4 + 0.5 * 8]


def test_ratios_of_the_largest_numbers_are_clipped() -> None:
    targets, advantages = vtrace(
        torch.tensor([1e4, -1e4]), torch.ones(2), torch.zeros(2), torch.zeros(2), torch.tensor([True, False]), 0.9
    )
    assert torch.isfinite(targets).all()
    assert torch.isfinite(advantages).all()


@given(size=st.integers(1, 40), seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_discounted_sums(size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    terms, decay = random.normal(size=size), random.uniform(0, 1, size) * (random.random(size) < 0.9)
    decay[-1] = 0
    expected, ahead = np.zeros(size), 0.0
    for i in range(size - 1, -1, -1):
        expected[i] = ahead = terms[i] + decay[i] * ahead
    found = discounted_sums(terms, decay)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.case("O26")
@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_learner_bootstraps_from_final_observations_in_each_autoreset_mode(mode: AutoresetMode | None) -> None:
    make = partial(Count, (3, 5, 2, 4), (False, True, False, True))

    def creator(context: Any) -> Any:
        return make() if mode is None else SyncVectorEnv([make] * 2, autoreset_mode=mode)

    runner = EnvRunner(creator, ModulePolicy, policy_config={"seed": 3}, num_envs=2, seed=3)
    batch = SampleBatch.concat_samples([runner.sample(22), runner.sample(14)])
    policy = ModulePolicy(runner.observation_space, runner.action_space, {"seed": 9})
    config = {"gamma": 0.9, "entropy_coeff": 0.0, "vtrace_clip_rho_threshold": 1.0, "vtrace_clip_pg_rho_threshold": 1.0}
    learner = IMPALALearner(policy.module, config)
    tensors = learner.tensors_of(batch)
    with torch.no_grad():
        outputs = policy.module.forward_train(tensors)
        assert policy.module.distribution is not None
        logp = policy.module.distribution.log_prob(outputs["action_dist_inputs"], tensors["actions"])
        targets, advantages = learner.traced(tensors, logp, outputs["vf_preds"])
    ratios = (logp - tensors["action_logp"]).numpy()
    bounds = [*learner.edges(batch).tolist(), len(batch)]
    kinds = set()
    for start, end in pairwise(bounds):
        part = batch[start:end]
        assert len(set(part["eps_id"].tolist())) == 1
        assert (np.diff(part["t"]) == 1).all()
        kinds.add((bool(part["terminateds"][-1]), bool(part["truncateds"][-1])))
        last = 0.0 if part["terminateds"][-1] else float(policy.values_of(part["new_obs"][-1:])[0])
        values = policy.values_of(part["obs"])
        expected = twin(Trajectory(ratios[start:end], part["rewards"], values, last), 0.9, 1.0, 1.0)
        np.testing.assert_allclose(targets[start:end], expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(advantages[start:end], expected[1], rtol=1e-5, atol=1e-5)
    assert kinds == {(True, False), (False, True), (False, False)}
