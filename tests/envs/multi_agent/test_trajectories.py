"""Which result belongs to which action, and how each agent's trajectory ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh.envs import EnvRunner, ModulePolicy, MultiAgentBatch, MultiAgentEnvRunner, SampleBatch
from rlmesh.errors import UsageError

from .environments import Always, Event, Scripted

GAMMA, LAMBDA = 0.9, 0.8


class Valued(ModulePolicy):
    """Acts by a module; the value of an observation is ``10 · episode + event + 1``."""

    def values_of(self, observations: np.ndarray, states: Any = None) -> np.ndarray:
        values: np.ndarray = 10 * observations[:, 0] + observations[:, 1] + 1
        return values.astype(np.float32)


def runner_of(episodes: list[list[Event]], **more: Any) -> MultiAgentEnvRunner:
    config = {"estimate_advantages": True, "gamma": GAMMA, "lambda_": LAMBDA}
    fails = more.pop("fails", None)
    made: list[Scripted] = []

    def creator(context: Any) -> Scripted:
        made.append(Scripted(episodes, fails if not made else None))
        return made[-1]

    more.setdefault("policies", {"even", "odd"})
    more.setdefault("policy_mapping_fn", lambda agent_id, episode: "odd" if agent_id == "b" else "even")
    return MultiAgentEnvRunner(creator, Valued, policy_config=config, **more)


def by_hand(part: SampleBatch) -> np.ndarray:
    """Advantages of one trajectory, or of its part in a batch, as a plain sum over the future."""
    value = 10 * part["obs"][:, 0] + part["obs"][:, 1] + 1
    after = 10 * part["new_obs"][:, 0] + part["new_obs"][:, 1] + 1
    after = np.where(part["terminateds"], 0.0, after)
    deltas = part["rewards"] + GAMMA * after - value
    size = len(deltas)
    return np.array([sum((GAMMA * LAMBDA) ** (k - t) * deltas[k] for k in range(t, size)) for t in range(size)])


ALTERNATING = [
    Event(("a",)),
    Event(("b",), {"a": 1.0}),
    Event(("a",), {"a": 2.0, "b": 10.0}),
    Event(("b",), {"a": 4.0, "b": 20.0}),
    Event((), {"a": -1.0, "b": 1.0}, terminated=("__all__",)),
]


def test_rewards_between_turns_are_added_up() -> None:
    runner = runner_of([ALTERNATING])
    batch = runner.sample(4)
    assert isinstance(batch, MultiAgentBatch)
    assert (batch.env_steps(), batch.agent_steps()) == (4, 4)
    even, odd = batch["even"], batch["odd"]
    assert even["obs"][:, 1].tolist() == [0, 2]
    assert even["rewards"].tolist() == [3.0, 3.0]  # 1 + 2, and 4 - 1 at the end, in the opponent's turn
    assert odd["obs"][:, 1].tolist() == [1, 3]
    assert odd["rewards"].tolist() == [30.0, 1.0]  # 10 + 20, and 1
    assert even["terminateds"].tolist() == odd["terminateds"].tolist() == [False, True]
    assert even["new_obs"][0].tolist() == even["obs"][1].tolist()
    assert even["t"].tolist() == odd["t"].tolist() == [0, 1]
    for part in (even, odd):
        np.testing.assert_allclose(part["advantages"], by_hand(part), rtol=1e-5)
    stats = runner.take_stats()
    assert stats.returns == [1 + 12 + 24 + 0]
    assert stats.of_agents == [{"a": ("even", 6.0), "b": ("odd", 31.0)}]
    assert stats.lengths == [4]


def test_an_action_whose_result_is_missing_is_in_the_next_batch() -> None:
    whole = runner_of([ALTERNATING], seed=3).sample(8)
    runner = runner_of([ALTERNATING], seed=3)
    parts = [runner.sample(1) for _ in range(8)]
    assert [part.agent_steps() for part in parts] == [0, 1, 1, 2, 0, 1, 1, 2]
    joined = MultiAgentBatch.concat_samples(parts)
    for name in ("even", "odd"):
        for column in ("obs", "rewards", "terminateds", "eps_id", "t", "new_obs"):
            assert np.array_equal(joined[name][column], whole[name][column]), (name, column)


def test_a_truncated_agent_needs_its_last_observation() -> None:
    cut = [Event(("a", "b")), Event(("b",), {"a": 1.0}, truncated=("a",))]
    with pytest.raises(UsageError, match=r"environment 0 of runner 0: agent 'a' was truncated without an observation"):
        runner_of([cut]).sample(1)
    good = [Event(("a", "b")), Event(("a", "b"), {"a": 1.0, "b": 2.0}, truncated=("a",)),
            Event(("b",), {"b": 1.0}, truncated=("__all__",))]  # fmt: skip
    batch = runner_of([good]).sample(2)
    assert batch["even"]["truncateds"].tolist() == [True]
    assert batch["even"]["new_obs"].tolist() == [[0, 1]]
    # V(s') = 2 with γ = 0.9, V(s) = 1
    np.testing.assert_allclose(batch["even"]["advantages"], [1 + 0.9 * 2 - 1], rtol=1e-6)
    assert batch["odd"]["truncateds"].tolist() == [False, True]
    np.testing.assert_allclose(batch["odd"]["advantages"], by_hand(batch["odd"]), rtol=1e-6)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event(("a",), {"c": 1.0}, terminated=("b",)), None),
        (Event(("a", "b"), {"b": float("nan")}), "gave agent 'b' the reward nan"),
    ],
)
def test_rules_of_an_environment(event: Event, message: str | None) -> None:
    script = [Event(("a", "b")), event, Event(("a", "b"), {"b": 1.0}, terminated=("__all__",))]
    runner = runner_of([script])
    if message is not None:
        with pytest.raises(FloatingPointError, match=message):
            runner.sample(2)
        return
    with pytest.raises(UsageError, match="agent 'b' was done, and has a reward again"):
        runner.sample(2)
    assert runner.take_stats().env_steps == 0  # nothing of a failed sample is counted


def test_an_environment_without_the_key_for_all_is_refused() -> None:
    class Silent(Scripted):
        def step(self, actions: Any) -> Any:
            observations, rewards, _, truncateds, infos = super().step(actions)
            return observations, rewards, {}, truncateds, infos

    runner = MultiAgentEnvRunner(lambda context: Silent([ALTERNATING]), Always)
    with pytest.raises(UsageError, match="terminateds has no key '__all__'"):
        runner.sample(1)


def test_an_environment_that_breaks_leaves_no_row_for_the_failed_step() -> None:
    runner = runner_of([ALTERNATING], fails=(0, 3))
    batch = runner.sample(8)
    stats = runner.take_stats()
    assert (stats.cut, stats.env_steps, stats.returns) == (1, 7, [37.0])
    even = batch["even"]
    first = even[even["eps_id"] == even["eps_id"][0]]
    assert first["rewards"].tolist() == [3.0]  # the second action has no result
    assert not first["dones"].any()
    # Its value goes on from the observation that the lost action was chosen for.
    np.testing.assert_allclose(first["advantages"], [3 + 0.9 * 3 - 1], rtol=1e-6)
    assert "odd" in batch.policy_batches


def test_whole_episodes() -> None:
    long = [Event(("a",)), *[Event(("a",), {"a": 1.0})] * 5, Event((), {"a": 1.0}, terminated=("__all__",))]
    runner = runner_of([long, ALTERNATING], num_envs=2)
    runner.sample(6)
    runner.take_stats()
    batch = runner.sample(num_episodes=3)
    stats = runner.take_stats()
    assert len(stats) == 3
    assert stats.env_steps == batch.env_steps() == sum(stats.lengths)
    assert all(part["dones"][-1] for each in batch.policy_batches.values() for part in each.split_by_episode())


@st.composite
def scripts(draw: Any) -> list[Event]:
    """A random episode that keeps the rules."""
    alive = list(draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))])
    waiting = [each for each in ("a", "b", "c") if each not in alive]
    events = [Event(tuple(alive[: draw(st.integers(1, len(alive)))]))]
    known = set(events[0].seen)
    for _ in range(draw(st.integers(1, 8))):
        active = sorted(known & set(alive))
        rewards = {each: float(draw(st.integers(-3, 3))) for each in alive if draw(st.booleans())}
        seen = {each for each in alive if draw(st.booleans())}
        ended = [each for each in active if draw(st.integers(0, 4)) == 0]
        terminated = tuple(each for each in ended if draw(st.booleans()))
        truncated = tuple(each for each in ended if each not in terminated)
        seen |= set(truncated)
        events.append(Event(tuple(sorted(seen)), rewards, terminated, truncated))
        known |= seen
        alive = [each for each in alive if each not in ended]
        if waiting and draw(st.booleans()):
            alive.append(waiting.pop())
        if not alive:
            break
    over = draw(st.booleans())
    everyone = tuple(sorted(alive))
    rewards = {each: 1.0 for each in alive if each in known}
    events.append(Event(everyone, rewards, *((("__all__",), ()) if over else ((), ("__all__",)))))
    return events


def expected_rows(script: list[Event], episode: int) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each agent of one episode: number of the event that it saw, reward, the next one, and flags."""
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for agent in ("a", "b", "c"):
        saw: int | None = None
        reward, gone, own = 0.0, False, []
        for number, event in enumerate(script):
            if gone:
                break
            if number:
                reward += event.rewards.get(agent, 0.0) if saw is not None else 0.0
            everyone_ends = {"__all__"} & {*event.terminated, *event.truncated}
            terminated = agent in event.terminated or ("__all__" in event.terminated and agent not in event.truncated)
            truncated = agent in event.truncated or (
                "__all__" in event.truncated and agent not in event.terminated and "__all__" not in event.terminated
            )
            ends = agent in (*event.terminated, *event.truncated) or bool(everyone_ends)
            if saw is not None and (agent in event.seen or ends):
                after = number if agent in event.seen else saw
                own.append((saw, reward, after, terminated, truncated))
                reward, saw = 0.0, None
            if agent in event.seen and not ends:
                saw = number
            gone = ends
        if own:
            rows[agent] = own
    return rows


@pytest.mark.case("O26")
@settings(max_examples=60, deadline=None)
@given(
    episodes=st.lists(scripts(), min_size=1, max_size=3), fragments=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    number=st.integers(1, 2),
)  # fmt: skip
def test_each_agent_has_its_own_trajectory(episodes: list[list[Event]], fragments: list[int], number: int) -> None:
    """Any order of turns, agents that come and go, ends of all kinds: rows and advantages are those by hand."""
    runner = runner_of(episodes, num_envs=number)
    batches = [runner.sample(steps * number) for steps in [*fragments, 30]]
    found: dict[int, list[tuple[Any, ...]]] = {}
    where: dict[int, tuple[int, int]] = {}
    for batch in batches:
        for part in batch.policy_batches.values():
            for trajectory in part.split_by_episode():
                assert len(set(trajectory["agent_index"].tolist())) == 1
                np.testing.assert_allclose(trajectory["advantages"], by_hand(trajectory), rtol=1e-4, atol=1e-4)
                key = int(trajectory["eps_id"][0])
                assert trajectory["t"].tolist() == list(
                    range(len(found.get(key, [])), len(found.get(key, [])) + len(trajectory))
                )
                where[key] = (int(trajectory["obs"][0, 0]), int(trajectory["agent_index"][0]))
                found.setdefault(key, []).extend(
                    zip(
                        *(
                            trajectory[name].tolist() if trajectory[name].ndim == 1 else trajectory[name][:, 1].tolist()
                            for name in ("obs", "rewards", "new_obs", "terminateds", "truncateds")
                        ),
                        strict=True,
                    )
                )
    done = sum(batch.env_steps() for batch in batches) // number
    lengths = np.cumsum([len(episodes[k % len(episodes)]) - 1 for k in range(200)])
    finished = int(np.searchsorted(lengths, done, side="right"))
    got = sorted(rows for key, rows in found.items() if where[key][0] < finished)
    wanted = sorted(
        rows
        for k in range(finished)
        for rows in expected_rows(episodes[k % len(episodes)], k).values()
        for _ in range(number)
    )
    assert got == wanted


def test_a_runner_of_one_agent_refuses_several() -> None:
    with pytest.raises(UsageError, match="Scripted has several agents: use MultiAgentEnvRunner"):
        EnvRunner(lambda context: Scripted([ALTERNATING]), Always)
    with pytest.raises(UsageError, match="has one agent; several agents act in a MultiAgentEnv"):
        MultiAgentEnvRunner("CartPole-v1", Always)
