"""Every space of Gymnasium, as observation and as action."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlmesh.envs import EnvRunner, ModulePolicy, Policy, PPOConfig
from rlmesh.envs.environments.actions import ActionRows
from rlmesh.envs.environments.observations import ObservationRows
from rlmesh.envs.modules.distributions import distribution_of
from rlmesh.errors import UsageError

SEED = int(os.environ.get("SEED", "0"))
GRAPH = spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))


def graph(links: list[tuple[int, int]]) -> spaces.GraphInstance:
    nodes = np.zeros((3, 2), np.float32)
    return spaces.GraphInstance(nodes, np.zeros(len(links), np.int64), np.array(links))


def boxes(low: int, high: int, shape: tuple[int, ...], dtype: Any, one: int, other: int) -> tuple[Any, Any, Any]:
    """A Box, and two of its elements."""
    space: Any = spaces.Box(low, high, shape, dtype)
    return space, np.full(shape, one, dtype), np.full(shape, other, dtype)


MultiDiscrete: Any = spaces.MultiDiscrete  # is typed for one axis
OBSERVATIONS: dict[str, tuple[spaces.Space[Any], Any, Any]] = {
    "Box, no axis": boxes(-1, 1, (), np.float32, -1, 1),
    "Box, two axes, float64": boxes(-1, 1, (2, 3), np.float64, -1, 1),
    "Box, float16": boxes(-1, 1, (2,), np.float16, -1, 1),
    "Box, uint8": boxes(0, 3, (2,), np.uint8, 0, 2),
    "Box, int64": boxes(-5, 5, (2,), np.int64, -2, 2),
    "Discrete": (spaces.Discrete(3, start=-7), -7, -6),
    "MultiDiscrete, two axes": (
        MultiDiscrete([[2, 3], [2, 2]]), np.array([[0, 2], [0, 0]]), np.array([[0, 1], [0, 0]])
    ),
    "MultiBinary": (spaces.MultiBinary((2, 2)), np.eye(2, dtype=np.int8), np.zeros((2, 2), np.int8)),
    "Dict and Tuple": (
        spaces.Dict({"b": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))), "a": spaces.MultiBinary(2)}),
        {"b": (0, np.zeros(2, np.float32)), "a": np.zeros(2, np.int8)},
        {"b": (1, np.zeros(2, np.float32)), "a": np.zeros(2, np.int8)},
    ),
    "Text": (spaces.Text(4, min_length=0, charset="xyz"), "xy", "xyx"),
    "Sequence": (spaces.Sequence(spaces.Discrete(3)), (0, 1), (0, 1, 0)),
    "Sequence, stacked": (
        spaces.Sequence(spaces.Box(-1, 1, (1,)), stack=True), np.zeros((2, 1), np.float32), np.zeros((3, 1), np.float32)
    ),
    "Graph": (GRAPH, graph([(0, 1)]), graph([(1, 0)])),
    "OneOf": (spaces.OneOf((spaces.Discrete(2), spaces.Box(-1, 1, (1,)))), (0, 0), (1, np.zeros(1, np.float32))),
    "Dict of Text and Sequence": (
        spaces.Dict({"t": spaces.Text(2, charset="ab"), "s": spaces.Sequence(spaces.MultiBinary(2))}),
        {"t": "a", "s": ()}, {"t": "a", "s": (np.zeros(2, np.int8),)},
    ),
}  # fmt: skip


class Tells(gym.Env[Any, Any]):
    """One step: which of two observations is it."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space[Any], zero: Any, one: Any) -> None:
        assert space.contains(zero)
        assert space.contains(one)
        self.observation_space, self.pair = space, (zero, one)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.bit = int(self.np_random.integers(2))
        return self.pair[self.bit], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.pair[self.bit], float(action == self.bit), True, False, {}


def learned(make: Callable[[], gym.Env[Any, Any]], wanted: float, iterations: int = 40) -> float:
    """The mean return of an evaluation after training until it is reached."""
    config = PPOConfig().environment(lambda context: make()).env_runners(num_envs_per_env_runner=16)
    config.training(train_batch_size=256, minibatch_size=64, lr=4e-3, num_epochs=6, gamma=0.0)
    config.evaluation(evaluation_duration=32).rl_module(model_config={"fcnet_hiddens": (32,), "log_std_init": -0.5})
    with config.debugging(seed=SEED).build() as algorithm:
        for _ in range(iterations):
            if algorithm.train()["env_runners"]["episode_return_mean"] >= wanted:
                break
        return float(algorithm.evaluate()["env_runners"]["episode_return_mean"])


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_policy_tells_observations_of_each_space_apart(name: str) -> None:
    assert learned(lambda: Tells(*OBSERVATIONS[name]), 0.98) >= 0.99


def near(value: Any, wanted: float) -> float:
    return 1.0 - min(1.0, float(np.abs(np.asarray(value, np.float64) - wanted).mean()))


def same(one: Any, other: Any) -> float:
    """The share of equal elements."""
    return float((np.asarray(one) == np.asarray(other)).mean())


INSIDE = spaces.Dict(
    {"go": spaces.Discrete(3, start=1), "how": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)))}
)
ACTIONS: dict[str, tuple[spaces.Space[Any], Callable[[Any, int], float]]] = {
    "Box, no axis": (spaces.Box(-1, 1, ()), lambda a, bit: near(a, bit - 0.5)),
    "Box, two axes, float64": (spaces.Box(-1, 1, (2, 2), np.float64), lambda a, bit: near(a, bit - 0.5)),
    "Box, float16": (spaces.Box(-1, 1, (1,), np.float16), lambda a, bit: near(a, bit - 0.5)),
    "Box, int16": (spaces.Box(-2, 2, (2,), np.int16), lambda a, bit: same(a, 4 * bit - 2)),
    "Box, uint8, bounds that differ": (
        spaces.Box(np.array([3, 250]), np.array([4, 255]), dtype=np.uint8),
        lambda a, bit: same(a, [3 + bit, 255 - bit]),
    ),
    "Discrete": (spaces.Discrete(4, start=-2), lambda a, bit: same(a, bit - 2)),
    "MultiDiscrete, two axes": (
        MultiDiscrete([[2, 3], [3, 2]], start=[[0, 5], [0, 0]]),
        lambda a, bit: same(a, [[bit, 7], [2, 1 - bit]]),
    ),
    "MultiBinary": (spaces.MultiBinary((2, 2)), lambda a, bit: same(a, [[bit, 1], [0, 1 - bit]])),
    "Dict and Tuple": (
        INSIDE,
        lambda a, bit: (same(a["go"], 1 + 2 * bit) + near(a["how"][0], 0.5) + same(a["how"][1], [bit, 1])) / 3,
    ),
    "OneOf": (
        spaces.OneOf((spaces.Discrete(3), spaces.Box(-1, 1, (1,)))),
        lambda a, bit: 0.0 if a[0] != bit else near(a[1], 0.5) if bit else same(a[1], 2),
    ),
    "Text": (
        spaces.Text(3, min_length=1, charset="ab"),
        lambda a, bit: 0.5 * (len(a) == 1 + bit) + 0.5 * (a.startswith("ab"[bit])),
    ),
}  # fmt: skip


class Acts(gym.Env[Any, Any]):
    """One step: the action is judged by a function of it and of the bit that is observed."""

    observation_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space[Any], judge: Callable[[Any, int], float]) -> None:
        self.action_space, self.judge = space, judge

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.bit = int(self.np_random.integers(2))
        return self.bit, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise SystemExit(f"{action!r} is not in {self.action_space}")
        return self.bit, self.judge(action, self.bit), True, False, {}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_policy_acts_in_each_space(name: str) -> None:
    """Actions reach the environment in the structure of their space; the mean reward is at least 0.9."""
    space, judge = ACTIONS[name]
    assert learned(lambda: Acts(space, judge), 0.85) >= 0.9


@pytest.mark.parametrize("name", ACTIONS)
def test_rows_of_actions_keep_everything(name: str) -> None:
    space = ACTIONS[name][0]
    space.seed(3)
    rows = ActionRows(space)
    for _ in range(20):
        action = space.sample()
        given = np.asarray(action)[None] if rows.is_plain else [action]
        row = rows.to_rows(given)
        assert row.shape == (1, *rows.shape)
        (again,) = rows.to_env(row)
        assert space.contains(again), again
        assert np.array_equal(rows.to_rows([again] if not rows.is_plain else np.asarray(again)[None]), row)
        if name in ("Text", "OneOf"):
            assert type(again) is type(action)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Sequence(spaces.Discrete(2)), "no action can be chosen in Sequence.*: nothing bounds its length"),
        (spaces.Dict({"x": GRAPH}), "no action can be chosen in Graph"),
        (spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32), "has 8589934592 values in all, more than 65536"),
        (spaces.Box(-np.inf, np.inf, (2,), np.int64), "Narrow its bounds"),
    ],
)
def test_spaces_that_no_action_can_be_chosen_in(space: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EnvRunner(lambda context: Acts(space, lambda a, bit: 0.0), ModulePolicy)


CHOICES: dict[str, tuple[spaces.Space[Any], list[Any]]] = {
    "Text": (spaces.Text(2, min_length=0, charset="ab"), ["", "a", "b", "aa", "ab", "ba", "bb"]),
    "OneOf": (
        spaces.OneOf((spaces.Discrete(2, start=4), spaces.MultiBinary(2))),
        [(0, 4), (0, 5), *((1, np.array([i, j], np.int8)) for i in (0, 1) for j in (0, 1))],
    ),
    "Tuple": (
        spaces.Tuple((spaces.Discrete(2), spaces.OneOf((spaces.Discrete(1), spaces.Discrete(2))))),
        [(i, (which, j)) for i in (0, 1) for which, j in ((0, 0), (1, 0), (1, 1))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_probabilities_of_composed_actions(name: str) -> None:
    """All actions are enumerated: probabilities sum to 1; entropy and divergence are the sums over them."""
    space, actions = CHOICES[name]
    distribution = distribution_of(space)
    rows = torch.from_numpy(ActionRows(space).to_rows(actions))
    random = np.random.default_rng(1)
    one, other = (torch.from_numpy(random.normal(size=(1, distribution.size)).astype(np.float32)) for _ in range(2))
    logs = distribution.log_prob(one.expand(len(rows), -1), rows).double()
    others = distribution.log_prob(other.expand(len(rows), -1), rows).double()
    assert logs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert distribution.entropy(one).item() == pytest.approx(-(logs.exp() * logs).sum().item(), abs=1e-5)
    assert distribution.kl(one, other).item() == pytest.approx((logs.exp() * (logs - others)).sum().item(), abs=1e-5)

    count = 20_000
    drawn = distribution.sample(np.repeat(one.numpy(), count, 0), distribution.noise(random, (count,)))
    words = [str(each) for each in ActionRows(space).to_env(drawn)]
    for action, log in zip(ActionRows(space).to_env(rows.numpy()), logs, strict=True):
        assert words.count(str(action)) / count == pytest.approx(log.exp().item(), abs=0.015)


def test_elements_beyond_the_room_of_a_row_are_refused() -> None:
    space = spaces.Sequence(spaces.Discrete(3))
    rows = ObservationRows(space, 2)
    row = rows.empty(1)
    rows.write(row, 0, (1, 2))
    assert row.tolist() == [[1, 0, 1, 0, 1, 0, 0, 1]]
    with pytest.raises(UsageError, match=r"has 3 elements of a Sequence, and a row has room for 2: set environment"):
        rows.write(row, 0, (1, 2, 0))
    config = PPOConfig().environment(lambda context: Tells(space, (0,), (0,) * 20), max_sequence_length=20)
    with config.training(train_batch_size=16, minibatch_size=16).build() as algorithm:
        assert algorithm.train()["env_runners"]["num_episodes"] == 16


@pytest.mark.parametrize(
    ("space", "wrong", "message"),
    [
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}, r"has the parts \['b'\], its space \['a'\]"),
        (spaces.Dict({"a": spaces.Discrete(2, start=3)}), {"a": 2}, "an observation is 2"),
        (spaces.Tuple((spaces.Box(0, 1, (2,)),)), (np.zeros(3, np.float32),), r"has shape \(3,\), its space \(2,\)"),
        (spaces.Tuple((spaces.Box(0, 1, (2,), np.int64),)), (np.zeros(2, np.float32),), "elements of float32"),
        (spaces.Text(2, charset="ab"), "abc", "the text 'abc'"),
        (spaces.OneOf((spaces.Discrete(2),)), (1, 0), "is of part 1, its space has 1"),
    ],
)
def test_observations_outside_of_composed_spaces(space: Any, wrong: Any, message: str) -> None:
    rows = ObservationRows(space)
    with pytest.raises(UsageError, match=message):
        rows.write(rows.empty(1), 0, wrong)


def test_flat_observations_are_those_of_gymnasium() -> None:
    space = spaces.Dict({
        "b": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3]))), "a": spaces.MultiBinary((2, 2)),
        "c": spaces.Box(-1, 1, (2, 2)),
    })  # fmt: skip
    space.seed(0)
    rows = ObservationRows(space)
    for _ in range(10):
        observation = space.sample()
        row = rows.empty(1)
        rows.write(row, 0, observation)
        expected: Any = spaces.flatten(space, observation)
        assert np.array_equal(row[0], expected)
        assert row.dtype == expected.dtype


def test_actions_of_composed_spaces_are_in_them_at_their_bounds() -> None:
    """Bounds and numbers that float32 has not: actions beyond the bounds are clipped to exactly them."""
    start = 2**24 + 1
    space = spaces.Dict({
        "box": spaces.Box(-0.1, 0.1, (2,), np.float64),
        "choice": spaces.Discrete(3, start=start),
        "several": spaces.MultiDiscrete([2, 2], start=[start, -start]),
        "whole": spaces.Box(start, start + 2, (1,), np.int64),
    })  # fmt: skip
    policy = ModulePolicy(spaces.Box(-1, 1, (2,)), space, {"seed": 0})
    assert policy.module.distribution is not None
    inputs = np.random.default_rng(0).normal(0, 20, (200, policy.module.distribution.size)).astype(np.float32)
    sampled = policy.module.distribution.mode(inputs)
    rows = ActionRows(space)
    found = rows.to_env(policy.module.distribution.to_env(sampled))
    assert all(space.contains(action) for action in found)
    assert {int(action["choice"]) for action in found} == {start, start + 1, start + 2}
    assert {int(action["whole"][0]) for action in found} == {start, start + 1, start + 2}
    again = rows.to_env(rows.to_rows(found))
    assert all(np.array_equal(one[key], two[key]) for one, two in zip(found, again, strict=True) for key in one)
    logps = policy.module.distribution.log_prob(torch.from_numpy(inputs), torch.from_numpy(sampled))
    assert logps.dtype == torch.float32
    with pytest.raises(UsageError, match="has numbers beyond 2⁵³"):
        ActionRows(spaces.Tuple((spaces.Discrete(2, start=2**53),)))


def test_a_policy_of_fixed_rules_may_answer_in_the_structure_of_the_space() -> None:
    class Rules(Policy):
        def compute_actions(
            self, obs_batch: Any, state_batches: Any = None, *, explore: bool = True, **more: Any
        ) -> Any:
            how = (np.full(2, 0.5, np.float32), np.ones(2, np.int8))
            return [{"go": 1 + 2 * int(bit), "how": how} for bit in obs_batch], None, {}

    runner = EnvRunner(lambda context: Acts(INSIDE, lambda a, bit: same(a["go"], 1 + 2 * bit)), Rules, num_envs=3)
    assert runner.sample(30)["rewards"].all()


def test_single_actions_have_the_structure_of_the_space() -> None:
    config = PPOConfig().environment(lambda context: Acts(INSIDE, lambda a, bit: 0.0))
    with config.build() as algorithm:
        action = algorithm.compute_single_action(1, explore=True)
        assert INSIDE.contains(action)
        assert algorithm.compute_actions({"x": 0, "y": 1}).keys() == {"x", "y"}


def test_characters_have_one_order_in_all_processes() -> None:
    """Gymnasium keeps the order of a set in some versions, which differs from process to process."""
    one, other = spaces.Text(3, charset="abc"), spaces.Text(3, charset="cab")
    assert one == other
    rows = [ObservationRows(space) for space in (one, other)]
    written = [each.empty(1) for each in rows]
    for each, row in zip(rows, written, strict=True):
        each.write(row, 0, "ba")
    assert np.array_equal(written[0], written[1])
    actions = [ActionRows(space) for space in (one, other)]
    rows_of_actions = [each.to_rows(["cba"]) for each in actions]
    assert np.array_equal(rows_of_actions[0], rows_of_actions[1])
    row = actions[0].to_rows(["bc"])
    assert [each.to_env(row)[0] for each in actions] == ["bc", "bc"]
