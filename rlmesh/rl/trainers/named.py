"""Algorithms and rewards by name: built-in ones such as ``grpo`` or ``gsm8k``, and others as ``module:name``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.faults import did_you_mean

__all__ = ["ALGORITHMS", "REWARDS", "find_algorithm", "find_reward", "imported", "imported_parts"]

ALGORITHMS = {
    "grpo": "rlmesh.rl.algorithms:GRPO",
    "ppo": "rlmesh.rl.algorithms:PPO",
    "reinforce++": "rlmesh.rl.algorithms:ReinforcePlusPlus",
    "dpo": "rlmesh.rl.algorithms:DPO",
    "reward_modelling": "rlmesh.rl.algorithms:RewardModelling",
    "sft": "rlmesh.rl.algorithms:SFT",
    "behaviour_cloning": "rlmesh.rl.algorithms:BehaviourCloning",
    "on_policy_distillation": "rlmesh.rl.algorithms:OnPolicyDistillation",
}
REWARDS = {name: f"rlmesh.rl.rewards.{name}:compute_score" for name in ("code", "exact", "gsm8k", "math")}
VARIANTS = {
    **{name: f"loss: {name}" for name in ("dapo", "dr_grpo", "gspo", "cispo", "sapo")},
    **{name: f"advantage: {name}" for name in ("rloo", "remax", "opo", "pass_at_k")},
}
"""Names of GRPO variants in other libraries, each with the equivalent setting of `GRPO`."""


def find_algorithm(name: str) -> type[Any]:
    """The class of an algorithm.

    Raises:
        UsageError: there is none of this name, or it is no algorithm.
    """
    if ":" not in name:
        key = name.lower()
        if key in VARIANTS:
            raise UsageError(f"{name!r} is a variant of GRPO: write {{name: grpo, {VARIANTS[key]}}}")
        if key not in ALGORITHMS:
            valid = ALGORITHMS if get_close_matches(key, ALGORITHMS, 1) else [*ALGORITHMS, *VARIANTS]
            raise UsageError(f"there is no algorithm {name!r}{_nearest(key, valid)}")
        name = ALGORITHMS[key]
    found = imported(name)
    if not isinstance(found, type) or not hasattr(found, "weigh"):
        raise UsageError(f"{name} is no algorithm: expected a subclass of rlmesh.rl.algorithms.Algorithm")
    return found


def find_reward(name: str) -> Any:
    """A reward function.

    Raises:
        UsageError: there is none of this name.
    """
    if ":" not in name:
        if name not in REWARDS:
            raise UsageError(f"there is no reward {name!r}{_nearest(name, REWARDS)}")
        name = REWARDS[name]
    return imported(name)


def imported_parts(values: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Settings in which environment, agent and tools are objects instead of ``module:name``; faults are collected."""
    found = dict(values)

    def part(given: Any, place: str) -> Any:
        if not isinstance(given, str):
            return given
        try:
            if ":" not in given:
                raise UsageError(f"{given!r}: write module:name")
            return imported(given)
        except UsageError as error:
            faults.append(f"{place}: {error}")
            return None

    for key in ("environment", "agent"):
        if key in found:
            found[key] = part(found[key], key)
    if isinstance(tools := found.get("tools"), str | list | tuple):
        listed = [tools] if isinstance(tools, str) else tools
        made = [part(one, f"tools[{place}]") for place, one in enumerate(listed)]
        found["tools"] = [one for one in made if one is not None]
    return found


def imported(name: str) -> Any:
    """The object that ``module:name`` names.

    Raises:
        UsageError: the module cannot be imported, or has no such name.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module != missing and not module.startswith(f"{missing}."):
            raise UsageError(f"{name!r}: {module} needs the module {missing}, which is not installed") from error
        raise UsageError(
            f"{name!r}: there is no module {module!r} beside the configuration, in this folder, or on PYTHONPATH"
        ) from error
    except Exception as error:
        raise UsageError(f"{name!r}: importing {module} fails: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            own = [one for one in vars(found) if not one.startswith("_")] if hasattr(found, "__dict__") else []
            raise UsageError(f"{name!r}: {module} has no {part!r}{_nearest(part, own, listed=False)}")
        found = getattr(found, part)
    return found


def _nearest(name: str, valid: Any, *, listed: bool = True) -> str:
    return did_you_mean(name, valid, f": there are {', '.join(valid)}, and module:name for your own" if listed else "")
