"""Settings of several agents: wrong ones are refused before anything starts."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from rlmesh.envs import APPOConfig, DQNConfig, IMPALAConfig, MultiAgentEnv, PolicySpec, PPOConfig, make_multi_agent
from rlmesh.envs.checks import check_env
from rlmesh.envs.multi_agent.policies import AgentEpisode, PolicyMapping
from rlmesh.errors import UsageError

from .environments import Anything, Convoy, Shift


def refused(config: Any) -> str:
    with pytest.raises(UsageError) as caught:
        config.build()
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies": "first"}, "policies: names, or a dict by name, not 'first'"),
        ({"policies": {}}, "policies: name at least one policy"),
        ({"policies": {"first": 3}}, "'first' has a PolicySpec, a class of policies or None, not 3"),
        ({"policies": [1]}, "a policy's name is text, without __ at its start, not 1"),
        ({"policies": {"first", "second"}, "policies_to_train": ["fist"]}, "no policy 'fist'. Did you mean 'first'"),
        ({"policies_to_train": "first"}, "policies_to_train: names of policies, or a function"),
        ({"policy_mapping_fn": 3}, "policy_mapping_fn: a function of agent_id and episode, not 3"),
        ({"policy_mapping_fn": lambda: "first"}, "this one takes no argument"),
        ({"count_steps_by": "agent_step"}, "no 'agent_step'. Did you mean 'agent_steps'"),
        ({"policies": {"a": PolicySpec(config={"lrr": 1})}}, "'a' has no setting 'lrr'.*Did you mean 'lr'"),
        ({"policies": {"a": PolicySpec(config={"train_batch_size": 1})}}, "'a' has no setting 'train_batch_size'"),
        (
            {"policies": {"a": PolicySpec(config={"lr": "fast"})}},
            "policies: 'a': lr: a number between 0 and 1, or points",
        ),
        ({"policies": {"a": PolicySpec(config={"num_env_runners": 2})}}, "'a' has no setting 'num_env_runners'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PPOConfig().environment(Convoy).multi_agent(**settings).build()


def test_unknown_names_of_settings() -> None:
    with pytest.raises(UsageError, match=r"no setting 'policy_mapping'. Did you mean 'policy_mapping_fn'"):
        PPOConfig().multi_agent(policy_mapping=lambda a, e: a)
    with pytest.raises(UsageError, match=r"observation_fn=…\): change observations in the environment"):
        PPOConfig().multi_agent(observation_fn=None)
    with pytest.raises(UsageError, match="'gamma'"):
        DQNConfig().environment(Convoy).multi_agent(policies={"a": PolicySpec(config={"gamma": 0.5})}).build()


def test_settings_that_would_have_no_effect() -> None:
    for config in (IMPALAConfig(), APPOConfig(), DQNConfig()):
        text = refused(config.environment(Convoy).multi_agent(policies=["a"], count_steps_by="agent_steps"))
        assert "count_steps_by: this algorithm counts steps of environments" in text
    for config, name in ((IMPALAConfig(), "broadcast_interval"), (APPOConfig(), "circular_buffer_num_batches")):
        config.environment(Convoy).multi_agent(policies={"a": PolicySpec(config={name: 5})})
        assert f"'a' has no setting '{name}', which could differ" in refused(config)


def test_the_mapping_names_policies() -> None:
    config = PPOConfig().environment(Convoy).multi_agent(policies={"red", "blue"})
    assert "several policies have the names of agents" in refused(config.copy())
    text = refused(config.copy().multi_agent(policy_mapping_fn=lambda agent_id, episode: "rad"))
    assert "gives agent 'first' the policy 'rad', which is not among the policies. Did you mean 'red'?" in text


def test_forms_of_a_mapping() -> None:
    episode = AgentEpisode(7, 1)
    runner = object()

    def with_worker(agent_id: str, episode: Any, worker: Any, **kwargs: Any) -> str:
        assert worker is runner
        return "x"

    for fn in (lambda agent_id: "x", lambda agent_id, episode: "x", lambda agent_id, *args, **kwargs: "x",
               lambda aid, ep, **kw: "x" if kw["worker"] is runner and ep.id_ == 7 else "y", with_worker):  # fmt: skip
        assert PolicyMapping(fn, ["x"])("agent", episode, runner) == "x"
    assert PolicyMapping(None, ["only"])("agent", episode) == "only"
    assert PolicyMapping(None, ["a", "b"])("b", episode) == "b"


class Uneven(MultiAgentEnv):
    possible_agents = ("wide", "narrow")
    observation_spaces = {"wide": gym.spaces.Box(0, 1, (3,)), "narrow": gym.spaces.Box(0, 1, (1,))}  # noqa: RUF012
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return {name: space.sample() for name, space in self.observation_spaces.items()}, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        return self.reset()[0], {"wide": 1.0}, {"__all__": True}, {"__all__": False}, {}


def test_agents_of_one_policy_have_the_same_spaces() -> None:
    text = refused(PPOConfig().environment(Uneven))
    assert "agents 'wide' and 'narrow' have the policy 'default_policy' and differ in their spaces" in text
    config = PPOConfig().environment(Uneven).multi_agent(policies=["wide", "narrow"])
    with config.training(train_batch_size=64, minibatch_size=32).build() as algorithm:
        learners = algorithm.train()["learners"]
        assert {name: each["num_agent_steps_trained"] for name, each in learners.items()} == {"wide": 64, "narrow": 64}
    text = refused(config.copy().multi_agent(policies=["wide", "narrow", "spare"]))
    assert "no agent has the policy 'spare' at the start" in text
    space = Uneven.observation_spaces["wide"]
    spare = {"wide": None, "narrow": None, "spare": PolicySpec(None, space, Uneven.action_space)}
    with config.copy().multi_agent(policies=spare).build() as algorithm:
        assert algorithm.get_policy("spare").observation_space == space


def test_what_several_agents_do_not_have() -> None:
    with pytest.raises(UsageError, match=r"the environment .* has one agent"):
        PPOConfig().environment("CartPole-v1").multi_agent(policies={"a"}).build()


def test_the_only_policy_may_be_named_for_one_agent() -> None:
    spec = PolicySpec(config={"lr": 0.25})
    config = PPOConfig().environment("CartPole-v1").multi_agent(policies={"default_policy": spec})
    with config.training(train_batch_size=64, minibatch_size=64).build() as algorithm:
        assert algorithm.train()["learners"]["default_policy"]["learner_stats"]["curr_lr"] == 0.25
    config = PPOConfig().environment("CartPole-v1").multi_agent(policies={"default_policy": PolicySpec(Anything)})
    with pytest.raises(UsageError, match="has no learn_on_batch"):
        config.build()


def test_copies_of_an_environment() -> None:
    env = make_multi_agent("CartPole-v1")({"num_agents": 3})
    observations, _ = env.reset(seed=1)
    assert list(observations) == [0, 1, 2]
    steps, over = 0, False
    while not over:
        live = [agent for agent in observations if agent not in env.done]
        observations, _, terminateds, _, _ = env.step(dict.fromkeys(live, 0))
        steps, over = steps + 1, terminateds["__all__"]
    assert steps < 20
    with pytest.raises(UsageError, match="num_agents is a whole number above 0, not 0"):
        make_multi_agent("CartPole-v1")({"num_agents": 0})


def test_build_checks_an_environment_of_several_agents_if_it_is_asked_to() -> None:
    assert check_env(Shift).passed
    config = PPOConfig().environment(Convoy, disable_env_checking=False)
    with pytest.raises(UsageError, match=r"Convoy: after-the-end: .* a step after the end of the episode is accepted"):
        config.build()
