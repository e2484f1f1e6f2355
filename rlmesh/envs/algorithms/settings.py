"""Settings that all algorithms have, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rlmesh.envs.environments.features import SEQUENCE_LENGTH
from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.multi_agent.settings import multi_agent_problems
from rlmesh.envs.settings.allowed import (
    DICT,
    FLAG,
    Allowed,
    faults_of,
    list_of,
    number,
    one_of,
    optional,
    schedule,
    whole,
)
from rlmesh.envs.settings.model import model_faults
from rlmesh.errors import UsageError

__all__ = ["ALIASES", "ALLOWED", "NOT_THERE", "SECTIONS", "problems_of", "require_one_name_each"]

SECTIONS: dict[str, dict[str, Any]] = {
    "environment": {
        "env": None, "env_config": {}, "disable_env_checking": True, "max_sequence_length": SEQUENCE_LENGTH,
    },
    "env_runners": {
        "num_env_runners": 0, "num_envs_per_env_runner": 1, "rollout_fragment_length": "auto", "explore": True,
        "vectorize_mode": "local", "sample_timeout_s": 600.0, "connectors": (),
        "max_requests_in_flight_per_env_runner": 1,
    },
    "training": {
        "lr": 3e-4, "gamma": 0.99, "train_batch_size": 4000, "grad_clip": 0.5, "model": {}, "num_epochs": 1,
        "minibatch_size": None, "adam_epsilon": 1e-5,
    },
    "learners": {"num_learners": 0, "torch_threads": None},
    "offline_data": {"input_": None, "dataset_num_iters_per_learner": None},
    "multi_agent": {
        "policies": None, "policy_mapping_fn": None, "policies_to_train": None, "count_steps_by": "env_steps",
    },
    "evaluation": {
        "evaluation_interval": None, "evaluation_duration": 10, "evaluation_duration_unit": "episodes",
        "evaluation_num_env_runners": 0, "evaluation_config": {},
    },
    "fault_tolerance": {
        "restart_failed_env_runners": True, "restart_failed_sub_environments": True, "max_env_runner_restarts": 100,
        "max_learner_restarts": 3,
    },
    "rl_module": {"module_class": None, "model_config": {}},
    "debugging": {"seed": None},
    "reporting": {"metrics_num_episodes_for_smoothing": 100, "min_env_steps_per_iteration": 0},
}  # fmt: skip
"""Defaults by section. A subclass of `AlgorithmConfig` adds its own to ``training``."""

ALIASES: dict[str, str] = {
    "evaluation_num_workers": "evaluation_num_env_runners", "gae_lambda": "lambda_",
    "gym_env_vectorize_mode": "vectorize_mode", "lambda": "lambda_", "lr_schedule": "lr",
    "min_sample_timesteps_per_iteration": "min_env_steps_per_iteration",
    "mini_batch_size_per_learner": "minibatch_size", "minibatch_size_per_learner": "minibatch_size",
    "num_envs": "num_envs_per_env_runner", "num_envs_per_worker": "num_envs_per_env_runner",
    "num_rollout_workers": "num_env_runners", "num_sgd_iter": "num_epochs", "num_workers": "num_env_runners",
    "recreate_failed_env_runners": "restart_failed_env_runners",
    "recreate_failed_workers": "restart_failed_env_runners", "rl_module_class": "module_class",
    "sgd_minibatch_size": "minibatch_size", "train_batch_size_per_learner": "train_batch_size",
}  # fmt: skip
"""Names of older versions of RLlib, and of its relatives."""

NOT_THERE: dict[str, str] = {
    "algorithm_config_overrides_per_module": "give PolicySpec(config={…}) as a policy",
    "batch_mode": "fragments of episodes are bootstrapped, so whole episodes are not needed; leave the setting out",
    "num_gpus": "GPUs cannot be chosen yet; leave the setting out",
    "num_gpus_per_learner": "GPUs cannot be chosen yet; leave the setting out",
    "observation_fn": "change observations in the environment; leave the setting out",
    "observation_filter": "for MeanStdFilter, set connectors=[ObservationNormalizer()], of rlmesh.envs.connectors",
    "learner_queue_size": "runners are ahead by max_requests_in_flight_per_env_runner fragments at most; set that",
    "num_aggregator_actors_per_learner": "fragments are joined where the algorithm runs; leave the setting out",
    "policy_map_capacity": "all policies stay in memory; leave the setting out",
    "num_cpus_per_env_runner": "a remote runner is one process on one core; leave the setting out",
}
"""Settings of RLlib without a counterpart, and the reason."""

MOST_PROCESSES, MOST_ROWS = 10_000, 1_000_000_000
_STEPS = whole(1, MOST_ROWS)
_CONNECTORS = list_of(
    Allowed("", lambda each: not isinstance(each, type) and hasattr(each, "bind")),
    "a list of objects of rlmesh.envs.connectors",
)
ALLOWED: dict[str, Allowed] = {
    **dict.fromkeys(
        (
            "disable_env_checking", "explore", "restart_failed_env_runners", "restart_failed_sub_environments",
            "estimate_advantages",
        ),
        FLAG,
    ),
    **dict.fromkeys(
        (
            "max_env_runner_restarts", "max_learner_restarts", "min_env_steps_per_iteration",
        ),
        whole(0),
    ),
    **dict.fromkeys(("num_env_runners", "evaluation_num_env_runners", "num_learners"), whole(0, MOST_PROCESSES)),
    **dict.fromkeys(
        (
            "num_epochs", "evaluation_duration", "max_requests_in_flight_per_env_runner",
            "metrics_num_episodes_for_smoothing",
        ),
        whole(1),
    ),
    **dict.fromkeys(("num_envs_per_env_runner", "max_sequence_length"), whole(1, 1_000_000)),
    "train_batch_size": whole(1, MOST_ROWS),
    **dict.fromkeys(("minibatch_size", "evaluation_interval", "dataset_num_iters_per_learner"), optional(whole(1))),
    "torch_threads": optional(whole(1, 1024)),
    "rollout_fragment_length": Allowed(
        f"{_STEPS.text}, or 'auto'", lambda value: value == "auto" or _STEPS.accepts(value), nearest=_STEPS.nearest
    ),
    **dict.fromkeys(("gamma", "lambda_"), number(0, 1)),
    "lr": schedule(number(0, 1)),
    "adam_epsilon": number(0, 1, above=True),
    **dict.fromkeys(("grad_clip", "sample_timeout_s"), optional(number(0, above=True, endless=True))),
    "seed": optional(whole(0, 2**63 - 1)),
    "evaluation_duration_unit": one_of("episodes", "timesteps"),
    "vectorize_mode": one_of("local", "sync", "async", "vector_entry_point", "envpool"),
    **dict.fromkeys(("env_config", "model", "model_config", "evaluation_config"), DICT),
    "connectors": Allowed(
        f"{_CONNECTORS.text}, or a dict of such lists by policy",
        lambda value: all(map(_CONNECTORS.accepts, value.values() if isinstance(value, Mapping) else [value])),
    ),
    "module_class": optional(Allowed("a class of modules", callable)),
}  # fmt: skip
"""The values of settings of all algorithms. A class of settings adds those of its own as ``allowed``."""
_OF_EVALUATION = {
    *SECTIONS["environment"], *SECTIONS["env_runners"], *SECTIONS["fault_tolerance"], "seed",
} - {"disable_env_checking", "num_env_runners", "rollout_fragment_length"}  # fmt: skip
"""Settings that ``evaluation_config`` may change: those of environments and of the runners that step them."""


def require_one_name_each(where: str, given: Iterable[str]) -> None:
    """Raise `UsageError` if two names of one setting are given, of which one would have no effect."""
    names: dict[str, str] = {}
    for name in given:
        if (other := names.setdefault(ALIASES.get(name, name), name)) != name:
            raise UsageError(f"{where}: {other!r} and {name!r} are names of one setting; give one of them")


def problems_of(
    values: Mapping[str, Any], allowed: Mapping[str, Allowed], defaults: Mapping[str, Any] | None = None,
    model_keys: Collection[str] | None = None,
) -> list[str]:  # fmt: skip
    """The faults of single settings by these rules, of those of the model, and of those of several agents."""
    found = [*faults_of(values, allowed, defaults=defaults), *model_faults(values, model_keys)]
    size, batch = values["minibatch_size"], values["train_batch_size"]
    if type(size) is int and type(batch) is int and size > batch:
        found.append(f"minibatch_size={size} is larger than train_batch_size={batch}; the nearest is {batch}, or None")
    evaluation: Any = values["evaluation_config"]
    for name, value in evaluation.items() if isinstance(evaluation, Mapping) else ():
        setting = ALIASES.get(str(name), str(name))
        if setting not in _OF_EVALUATION:
            found.append(f"evaluation_config: {name!r} changes nothing there.{did_you_mean(name, _OF_EVALUATION)}")
        else:
            found += faults_of({setting: value}, allowed, prefix="evaluation_config: ")
    return [*found, *multi_agent_problems(values)]
