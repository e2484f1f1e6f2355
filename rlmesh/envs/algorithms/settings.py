"""Settings that all algorithms have, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmesh.envs.environments.features import SEQUENCE_LENGTH
from rlmesh.envs.environments.registry import did_you_mean
from rlmesh.envs.learners.schedule import schedule_problem
from rlmesh.envs.multi_agent.settings import multi_agent_problems

__all__ = ["ALIASES", "NOT_THERE", "SECTIONS", "problems_of"]

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

_COUNTS = (
    ("num_env_runners", 0), ("num_envs_per_env_runner", 1), ("train_batch_size", 1), ("num_epochs", 1),
    ("evaluation_duration", 1), ("evaluation_num_env_runners", 0), ("max_env_runner_restarts", 0),
    ("num_learners", 0), ("max_learner_restarts", 0), ("max_requests_in_flight_per_env_runner", 1),
    ("min_env_steps_per_iteration", 0),
    ("metrics_num_episodes_for_smoothing", 1), ("max_sequence_length", 1),
)  # fmt: skip
_COUNTS_OR_NONE = ("minibatch_size", "evaluation_interval", "torch_threads", "dataset_num_iters_per_learner")
_UNITS = ("episodes", "timesteps")
_OF_EVALUATION = {
    *SECTIONS["environment"], *SECTIONS["env_runners"], *SECTIONS["fault_tolerance"], "seed",
} - {"disable_env_checking", "num_env_runners", "rollout_fragment_length"}  # fmt: skip
"""Settings that ``evaluation_config`` may change: those of environments and of the runners that step them."""


def problems_of(values: Mapping[str, Any]) -> list[str]:
    """The faults of the settings that all algorithms have."""
    found: list[str | None] = [_count(values, name, least) for name, least in _COUNTS]
    found += [_count(values, name, 1) for name in _COUNTS_OR_NONE if values[name] is not None]
    if values["rollout_fragment_length"] != "auto" and _count(values, "rollout_fragment_length", 1):
        found.append(f"{_count(values, 'rollout_fragment_length', 1)}; or 'auto'")
    found += [_number(values, name, 0, 1) for name in ("gamma", "lambda_") if name in values]
    found += [schedule_problem(name, values[name]) for name in ("lr", "clip_param") if name in values]
    found += [_number(values, n, 1e-30, None) for n in ("grad_clip", "sample_timeout_s") if values[n] is not None]
    found += [
        f"{name}: a number of at least 0, not {values[name]!r}"
        for name in ("vf_loss_coeff", "kl_coeff", "kl_target")
        if name in values and not _is_weight(values[name])
    ]
    dicts = ("env_config", "model", "model_config", "evaluation_config")
    found += [f"{n}: a dict, not {values[n]!r}" for n in dicts if not isinstance(values[n], Mapping)]
    for name in values["evaluation_config"] if isinstance(values["evaluation_config"], Mapping) else ():
        if ALIASES.get(name, name) not in _OF_EVALUATION:
            found.append(f"evaluation_config: {name!r} changes nothing there.{did_you_mean(name, _OF_EVALUATION)}")
    if values["evaluation_duration_unit"] not in _UNITS:
        hint = did_you_mean(str(values["evaluation_duration_unit"]), _UNITS)
        found.append(f"evaluation_duration_unit: there is no {values['evaluation_duration_unit']!r}.{hint}")
    if values["seed"] is not None and (type(values["seed"]) is not int or values["seed"] < 0):
        found.append(f"seed: a whole number of at least 0, or None, not {values['seed']!r}")
    found += multi_agent_problems(values)
    return [problem for problem in found if problem is not None]


def _count(values: Mapping[str, Any], name: str, least: int) -> str | None:
    if type(values[name]) is int and values[name] >= least:
        return None
    return f"{name}: a whole number of at least {least}, not {values[name]!r}"


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _number(values: Mapping[str, Any], name: str, least: float, most: float | None) -> str | None:
    value = values[name]
    if isinstance(value, int | float) and value >= least and (most is None or value <= most):
        return None
    return f"{name}: a number {'above 0' if most is None else f'between {least} and {most}'}, not {value!r}"
