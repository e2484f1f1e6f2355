"""The values of settings: what each may be, and one error that names the setting, the value and what is allowed."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from rlmesh.envs import (
    A2CConfig,
    APPOConfig,
    BCConfig,
    DQNConfig,
    IMPALAConfig,
    MARWILConfig,
    PGConfig,
    PolicySpec,
    PPOConfig,
    SACConfig,
    TD3Config,
)
from rlmesh.envs.connectors import FrameStack, ObservationNormalizer, RewardClip
from rlmesh.envs.modules.policy import Policy
from rlmesh.envs.modules.rl_module import ActorCriticModule, RLModule
from rlmesh.envs.replay import PrioritizedReplayBuffer
from rlmesh.envs.settings.allowed import FLAG, number, one_of, optional, schedule, whole
from rlmesh.errors import UsageError

CONFIGS: Any = [
    A2CConfig, APPOConfig, BCConfig, DQNConfig, IMPALAConfig, MARWILConfig, PGConfig, PPOConfig, SACConfig, TD3Config,
]  # fmt: skip
FREE = {"env", "input_", "policies", "policy_mapping_fn", "policies_to_train", "count_steps_by", "replay_buffer_config",
        "vtrace"}  # fmt: skip
"""Settings with checks of their own."""
NAN, INF = math.nan, math.inf
REFUSED: Any = [
    (PPOConfig, "explore", ["no", 1, None], "explore: True or False, not"),
    (PPOConfig, "lr", [-1, 1.5, 1e10, NAN, INF, True, "1e-3", [], [[10, 1e-3]], [[0, 1e-3]],
             [[0, -1]], [[0, NAN]], [[0, 1], [0, 2]], None, 3j],
     "lr: a number between 0 and 1, or points [[0, value], [step, value], …] with growing steps, not"),
    (PPOConfig, "clip_param", [0, -1, 2, NAN, [[0, 0.2], [10, -0.1]]],
     "clip_param: a number above 0 and at most 1, or points"),
    (PPOConfig, "entropy_coeff", [-1, NAN, 1e10, "x", [[0, -0.1], [1, 0]]],
     "entropy_coeff: a number between 0 and 1000000, or points"),
    (PPOConfig, "gamma", [1.5, -1, NAN, True], "gamma: a number between 0 and 1, not"),
    (PPOConfig, "lambda_", [2, NAN], "lambda_: a number between 0 and 1, not"),
    (PPOConfig, "standardize_advantages", ["no", 0], "standardize_advantages: True, False or 'batch', not"),
    (PPOConfig, "vf_clip_param", [0, NAN], "vf_clip_param: a number above 0, or None, not"),
    (PPOConfig, "vf_loss_coeff", [NAN, INF, -1], "vf_loss_coeff: a number between 0 and 1000000, not"),
    (PPOConfig, "grad_clip", [0, NAN, "1"], "grad_clip: a number above 0, or None, not"),
    (PPOConfig, "adam_epsilon", [0, 2, NAN, None], "adam_epsilon: a number above 0 and at most 1, not"),
    (PPOConfig, "train_batch_size", [0, 10.5, 10**12, True, None],
     "train_batch_size: a whole number between 1 and 1000000000, not"),
    (PPOConfig, "rollout_fragment_length", [0, "all"],
     "a whole number between 1 and 1000000000, or 'auto', not"),
    (PPOConfig, "vectorize_mode", ["syn"], "not 'syn'. Did you mean 'sync'?"),
    (PPOConfig, "connectors", [["x"], [[0, 1]], None, 3], "connectors: a list of objects of rlmesh.envs.connectors"),
    (PPOConfig, "restart_failed_env_runners", ["no"], "restart_failed_env_runners: True or False, not 'no'"),
    (PPOConfig, "module_class", ["Net"], "module_class: a class of modules, or None, not 'Net'"),
    (PPOConfig, "evaluation_config", [{"explore": "no"}], "evaluation_config: explore: True or False, not 'no'"),
    (PPOConfig, "evaluation_config", [{"num_workers": 1, "num_envs": 0}], "num_envs_per_env_runner: a whole number"),
    (PPOConfig, "model", [3], "model: a dict, not 3"),
    (SACConfig, "model", [3], "model: a dict, not 3"),
    (DQNConfig, "double_q", ["no", None], "double_q: True or False, not"),
    (DQNConfig, "epsilon", [2, -0.1, [[0, 1.5], [10, 0]]], "epsilon: a number between 0 and 1, or points"),
    (DQNConfig, "tau", [0, 2, NAN], "tau: a number above 0 and at most 1, not"),
    (DQNConfig, "replay_buffer_config", [{"type": "PrioritizedReplayBuffer", "alpha": 1e10}],
     "alpha: a number between 0 and 1, not 10000000000.0; the nearest is 1"),
    (DQNConfig, "epsilon", [[[0, 0.5]]], "not [[0, 0.5]]; the nearest is 0.5"),
    (DQNConfig, "n_step", [0, 1.5, 10**12], "n_step: a whole number between 1 and 10000, not"),
    (DQNConfig, "target_network_update_freq", [0], "target_network_update_freq: a whole number of at least 1, not 0; "),
    (DQNConfig, "training_intensity", [0, 1e10], "training_intensity: a number above 0 and at most 1000000, or None"),
    (DQNConfig, "replay_buffer_config", [{"capacity": 0}],
     "replay_buffer_config: capacity: a whole number between 1 and 1000000000, not 0; the nearest is 1"),
    (DQNConfig, "replay_buffer_config", [{"type": "PrioritizedReplayBuffer", "beta": 2}], "beta: a number between 0"),
    (SACConfig, "target_entropy", ["aut", NAN, True], "target_entropy: a number or 'auto', not"),
    (SACConfig, "initial_alpha", [0, INF], "initial_alpha: a number above 0 and at most 1000000, not"),
    (TD3Config, "policy_delay", [0, True], "policy_delay: a whole number of at least 1, not"),
    (TD3Config, "target_noise", [-1, 1e10, NAN], "target_noise: a number between 0 and 2, not"),
    (IMPALAConfig, "vtrace_clip_rho_threshold", [0, NAN], "vtrace_clip_rho_threshold: a number above 0, or None, not"),
    (APPOConfig, "use_kl_loss", ["no"], "use_kl_loss: True or False, not 'no'"),
    (APPOConfig, "kl_target", [-1, 0, 1e10], "kl_target: a number above 0 and at most 100, not"),
    (APPOConfig, "circular_buffer_num_batches", [0, 10**12], "a whole number between 1 and 10000, not"),
    (PPOConfig, "torch_threads", [0, 10**6], "torch_threads: a whole number between 1 and 1024, or None, not"),
    (PPOConfig, "seed", [-1, 2**64], "seed: a whole number between 0 and"),
    (PPOConfig, "num_env_runners", [-1, 10**6], "num_env_runners: a whole number between 0 and 10000, not"),
    (PPOConfig, "policies", [[[0, 1]], {"a", 3}], "policies: names are text, not those of"),
    (PPOConfig, "policies_to_train", [[[0, 1]], [3]], "policies_to_train: there is no policy"),
    (MARWILConfig, "beta", [-1, 1e10, NAN], "beta: a number between 0 and 100, not"),
]  # fmt: skip
MODELS: Any = [
    ({"fcnet_hiddens": 64}, "fcnet_hiddens: a list of widths, whole numbers of at least 1, such as [64, 64], not 64"),
    ({"fcnet_hiddens": (0,)}, "fcnet_hiddens: a list of widths"), ({"fcnet_hiddens": "64"}, "not '64'"),
    ({"fcnet_activation": "rel"}, "not 'rel'. Did you mean 'relu'?"), ({"use_lstm": "no"}, "True or False, not 'no'"),
    ({"conv_filters": [[16, 8]]}, "conv_filters: a list of [channels, kernel, stride], or None, not [[16, 8]]"),
    ({"log_std_init": NAN}, "log_std_init: a number between -20 and 20, not nan"),
    ({"vf_share_layers": 1}, "vf_share_layers: True or False, or None, not 1"),
    ({"max_seq_len": 0}, "max_seq_len: a whole number between 1 and 1000000, not 0"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "values", "text"), REFUSED)
def test_a_value_that_is_not_allowed_is_refused_before_anything_starts(
    kind: Any, name: str, values: list[Any], text: str
) -> None:
    for value in values:
        config = kind().environment("no-such-environment")
        config[name] = value
        with pytest.raises(UsageError) as caught:
            config.build()
        assert text in str(caught.value), value


@pytest.mark.parametrize(("model", "text"), MODELS)
@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig, SACConfig, BCConfig])
def test_settings_of_built_in_modules_are_checked(kind: Any, model: dict[str, Any], text: str) -> None:
    for config in (kind().training(model=model), kind().rl_module(model_config=model)):
        with pytest.raises(UsageError) as caught:
            config.build()
        assert text in str(caught.value)


@pytest.mark.parametrize("kind", CONFIGS)
def test_unknown_keys_of_the_model_are_refused_before_anything_starts(kind: Any) -> None:
    config = kind().environment("no-such-environment").training(model={"fcnet_hidden": [8]})
    config.rl_module(model_config={"use_lstmm": True, "lstm_use_prev_action": True})
    with pytest.raises(UsageError) as caught:
        config.build()
    text = str(caught.value)
    assert "model has no key 'fcnet_hidden'. Did you mean 'fcnet_hiddens'?" in text
    assert "model_config has no key 'use_lstmm'. Did you mean 'use_lstm'?" in text
    assert "model_config 'lstm_use_prev_action': the policy sees observations alone" in text


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_known_keys_are_those_of_the_module(kind: Any) -> None:
    module = kind().policy_config()["module_class"] or ActorCriticModule
    assert kind.model_keys == module.known_settings.keys()


def test_unknown_keys_of_one_policy_are_refused() -> None:
    policies = {"a": PolicySpec(), "b": PolicySpec(config={"model": {"fcnet_hidden": [8]}})}
    with pytest.raises(UsageError, match="policies: 'b': model has no key 'fcnet_hidden'"):
        PPOConfig().environment("CartPole-v1").multi_agent(policies=policies).build()


def test_a_module_that_reads_its_settings_itself_may_have_any_keys() -> None:
    class Own(RLModule):
        @classmethod
        def settings(cls, given: Any) -> dict[str, Any]:
            return dict(given or {})

    class Known(RLModule):
        known_settings = {"width": 8}  # noqa: RUF012

    config = PPOConfig().environment("CartPole-v1").rl_module(model_config={"widht": 4})
    config.copy().rl_module(module_class=Own).validate()
    with pytest.raises(UsageError, match=r"model_config has no key 'widht'. Did you mean 'width'"):
        config.copy().rl_module(module_class=Known).validate()


def test_a_config_with_a_policy_of_its_own_may_have_any_keys() -> None:
    class Own(PPOConfig):
        def policy_class(self) -> Any:
            return Policy

    Own().environment("CartPole-v1").training(model={"anything": 1}).validate()


def test_a_module_of_ones_own_gives_its_settings_their_meaning() -> None:
    known, allowed = {"depth": 1, "fcnet_hiddens": 8}, {"depth": whole(1)}

    class OwnModule(RLModule):
        known_settings = known
        allowed_settings = allowed

    config = PPOConfig().environment("CartPole-v1").rl_module(module_class=OwnModule)
    config.copy().rl_module(model_config={"fcnet_hiddens": 64, "depth": 2}).validate()
    with pytest.raises(UsageError, match="model_config depth: a whole number of at least 1, not 0"):
        config.copy().rl_module(model_config={"depth": 0}).validate()


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_setting_has_a_rule_that_its_default_keeps(kind: Any) -> None:
    config = kind().environment("CartPole-v1")
    rules = kind._all_allowed()
    assert set(config.keys()) - set(rules) == FREE & set(config.keys())
    assert [
        fault for name, value in config.items() if name in rules and (fault := rules[name].fault(name, value))
    ] == []
    faults = [fault for fault in config.problems() if "offline_data" not in fault]
    assert faults == []


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (PPOConfig, {"lr": 0, "vf_clip_param": INF, "gamma": 1, "clip_param": [[0, 0.2], [1000, 0.0]],
                     "grad_clip": None, "entropy_coeff": [[0, 0.01], [1e6, 0]], "minibatch_size": None, "lambda_": 0}),
        (PPOConfig, {"lr": [(0, 1e-3), (10, 0)], "model": {"fcnet_hiddens": [], "conv_filters": [[16, [8, 8], 4]]}}),
        (PPOConfig, {"lr": np.array([[0, 1e-3], [10, 0]]), "model": {"fcnet_hiddens": np.array([8, 8])}}),
        (PPOConfig, {"model": None, "sample_timeout_s": None, "seed": None, "evaluation_interval": np.int64(2)}),
        (DQNConfig, {"epsilon": 0, "training_intensity": None, "tau": 1, "model": {"dueling": False}}),
        (SACConfig, {"target_entropy": -3, "initial_alpha": 1, "grad_clip": 40}),
        (IMPALAConfig, {"vtrace_clip_rho_threshold": None, "vtrace_clip_pg_rho_threshold": INF}),
    ],
)  # fmt: skip
def test_what_users_of_rllib_write_is_kept(kind: Any, settings: dict[str, Any]) -> None:
    kind().environment("CartPole-v1").update_from_dict(settings).validate()


def test_numbers_of_numpy_become_pythons_own() -> None:
    config = PPOConfig().environment("CartPole-v1")
    config.training(lr=np.float32(0.5), train_batch_size=np.int64(64), minibatch_size=np.int32(8))
    config.env_runners(explore=np.bool_(False)).debugging(seed=np.uint8(3))
    config.validate()
    found = [config.lr, config.train_batch_size, config.explore, config.seed]
    assert found == [0.5, 64, False, 3]
    assert [type(each) for each in found] == [float, int, bool, int]


def test_several_faults_come_in_one_error() -> None:
    with pytest.raises(UsageError, match="DQNConfig has 3 faults") as caught:
        DQNConfig().environment("CartPole-v1").training(double_q="no", epsilon=2, lr=NAN).build()
    assert all(f"{name}: " in str(caught.value) for name in ("double_q", "epsilon", "lr"))


@pytest.mark.parametrize(
    ("rule", "value", "hint"),
    [
        (number(0, 1), 1e10, "; the nearest is 1"), (number(0, 1), -1, "; the nearest is 0"),
        (number(0, 1), INF, "; the nearest is 1"), (number(0, 1), NAN, "; the default is 0.5"),
        (number(0, 1), "x", ""), (number(0, 1), True, ""),
        (number(0, above=True), 0, "; the default is 0.5"), (number(0, 9, above=True), 10, "; the nearest is 9"),
        (number(0), INF, "; the default is 0.5"), (number(), INF, "; the default is 0.5"),
        (whole(1), 0, "; the nearest is 1"), (whole(1), 2.6, "; the nearest is 3"), (whole(1), INF, "; the default is"),
        (whole(1, 9), 10**30, "; the nearest is 9"), (whole(1, 9), INF, "; the nearest is 9"),
        (optional(whole(1)), -5, "; the nearest is 1"),
        (schedule(number(0, 1)), 2, "; the nearest is 1"), (schedule(number(0, 1)), [[0, 0.3]], "; the nearest is 0.3"),
        (schedule(number(0, 1)), [[0, 3]], ""), (schedule(number(0, 1)), [[5, 0.3], [9, 0]], ""),
    ],
)  # fmt: skip
def test_the_nearest_allowed_value_is_named(rule: Any, value: Any, hint: str) -> None:
    text = rule.fault("x", value, 0.5)
    assert text.partition(f"not {value!r}")[2].startswith(hint)
    assert hint or text.endswith(repr(value))


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (PPOConfig, {"train_batch_size": 100, "minibatch_size": 200}, "minibatch_size=200 is larger than train_batch"),
        (PGConfig, {"minibatch_size": 2000}, "minibatch_size=2000 is larger than train_batch_size=1000; the nearest"),
        (BCConfig, {"minibatch_size": 4000}, "minibatch_size=4000 is larger than train_batch_size=2000"),
        (SACConfig, {"replay_buffer_config": {"capacity": 100}}, "capacity=100 is smaller than train_batch_size=256; "),
        (DQNConfig, {"n_step": 80, "replay_buffer_config": {"capacity": 70}}, "capacity=70 is smaller than n_step=80"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_each_other_are_refused(kind: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        kind().environment("CartPole-v1").update_from_dict(settings).validate()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ObservationNormalizer(clip=NAN), lambda: ObservationNormalizer(eps=INF), lambda: FrameStack(0),
        lambda: RewardClip(NAN, 1), lambda: PrioritizedReplayBuffer(8, alpha=NAN),
        lambda: PrioritizedReplayBuffer(8, alpha=2), lambda: PrioritizedReplayBuffer(8, eps=NAN),
    ],
)  # fmt: skip
def test_numbers_of_objects_in_settings_are_checked(make: Any) -> None:
    with pytest.raises(UsageError, match=r"must be|low must"):
        make()


def test_rules_say_what_they_allow() -> None:
    assert whole(1).fault("n", 2) is None
    assert whole(1).fault("n", 1.0) == "n: a whole number of at least 1, not 1.0; the nearest is 1"
    assert optional(FLAG).fault("f", None) is None
    assert number(endless=True).accepts(INF)
    assert not number(endless=True).accepts(NAN)
    assert schedule(number(0, 1)).fault("s", [[0, 1], [5, 0.5]]) is None
    assert one_of("relu", "tanh").fault("a", 3) == "a: one of 'relu', 'tanh', not 3."
    pickled = pickle.loads(pickle.dumps(PPOConfig().training(lr=1)))
    assert pickled.lr == 1
