"""A job's description, with its checks.

It may be changed until it is submitted (``job.workloads["ACTOR"].total = 4``); ``check`` checks all of it again and
reports all faults at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    SerializationInfo,
    field_serializer,
    field_validator,
)

from rlmesh.errors import JobSpecError, UsageError
from rlmesh.job.description.checks import (
    call_problems,
    collocation_problems,
    fusion_problems,
    mask_problems,
    member_problems,
    placing_problems,
    role_name_problems,
    size_problems,
)
from rlmesh.job.description.descriptors import BaseWorkloadDesc, WorkloadDesc, env_texts
from rlmesh.job.description.placement_rules import SeparationDesc
from rlmesh.job.description.resources import MOST
from rlmesh.job.description.restart_policy import RestartPolicy, effective_policy, names_a_budget
from rlmesh.job.description.spec import Spec
from rlmesh.job.description.time_limits import MAY_BE_0, TimeLimits
from rlmesh.job.entry_points.program import main_path
from rlmesh.job.jsonable import jsonable
from rlmesh.job.nearest_name import did_you_mean
from rlmesh.runtime.argument_types import MOST_S

__all__ = ["JobDescription", "job_name_problems"]

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class JobDescription(Spec):
    """A job: its roles, and job-level settings.

    Attributes:
        job_name: names the run's folder and its processes; ``submit`` may give another.
        dl_type: a label: PRE, SFT, RL or MULTIMODAL.
        user_config: any object that can be pickled; roles read it from ``current_worker().job_info``.
        workloads: role → descriptor.
        global_env: environment variables of all members; a role's own win.
        node_number: nodes that the job may use; ``None``: all that the cluster has.
        device_per_node: accelerators of each node that it may use; ``None``: all that the node has.
        device_type: ``GPU``, or ``CPU``: accelerators are then virtual slots that only limit placement.
        separations: sets of roles that are kept apart.
        pools: pools of devices: number of devices on each node; a role names its pool with ``pool``.
        spare_nodes: nodes that stay empty, to replace others.
        relaunch: a command that brings another machine in place of a lost node, when the others have no room for
            its members (``docs/placement.md``).
        collocations: sets of roles whose members share devices, rank by rank.
        fusions: sets of roles whose members share processes, rank by rank.
        restart: restart policy of roles without a policy of their own; a text is a scope
            (``never``, ``member``, ``role``, ``job``).
        limits: time limits of the phases, in seconds; a mapping names those that differ from the defaults.
        call_timeout_s: deadline of remote calls that set none, in seconds.
        preload: modules that processes import before they become workers; ``None``: found by reading
            the entry points' sources.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    job_name: str | None = None
    dl_type: Literal["PRE", "SFT", "RL", "MULTIMODAL"] | None = None
    user_config: Any = Field(default_factory=dict)
    workloads: dict[str, WorkloadDesc] = Field(default_factory=dict)
    global_env: dict[str, str] = Field(default_factory=dict, validation_alias=AliasChoices("global_env", "global_envs"))
    node_number: int | None = Field(
        default=None, ge=1, le=MOST, validation_alias=AliasChoices("node_number", "node_num")
    )
    device_per_node: int | None = Field(default=None, ge=1, le=MOST)
    device_type: Literal["CPU", "GPU"] = Field(
        default="GPU", validation_alias=AliasChoices("device_type", "accelerator_type")
    )
    collocations: list[set[str]] = Field(default_factory=list)
    fusions: list[set[str]] = Field(default_factory=list)
    separations: list[SeparationDesc] = Field(default_factory=list)
    pools: dict[str, list[int]] = Field(default_factory=dict)
    spare_nodes: int = Field(default=0, ge=0, le=MOST)
    relaunch: str = ""
    restart: RestartPolicy = Field(default_factory=RestartPolicy)
    limits: TimeLimits = Field(default_factory=TimeLimits)
    call_timeout_s: float = Field(default=1800.0, gt=0, le=MOST_S, allow_inf_nan=False)
    preload: tuple[str, ...] | None = None

    @field_validator("user_config", mode="plain")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("relaunch")
    @classmethod
    def _words(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not a command: {error}") from None
        return value

    @field_validator("limits", mode="before")
    @classmethod
    def _known_limits(cls, value: object) -> object:
        known = [field.name for field in fields(TimeLimits)]
        given = asdict(value) if isinstance(value, TimeLimits) else value
        if not isinstance(given, Mapping):
            return value
        for name, seconds in given.items():
            if name not in known:
                raise ValueError(f"there is no limit {name!r}.{did_you_mean(str(name), known)}")
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_S:
                raise ValueError(f"{name}={seconds!r}: it is a number of seconds above 0, at most {MOST_S:.0f}")
            if seconds == 0 and name not in MAY_BE_0:
                raise ValueError(f"{name}=0: it is a number of seconds above 0")
        return TimeLimits(**{name: float(seconds) for name, seconds in given.items()})

    @field_validator("global_env", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        return env_texts(value)

    @field_serializer("user_config", mode="plain")
    def _plain_user_config(self, value: Any, info: SerializationInfo) -> Any:
        return jsonable(value) if info.mode_is_json() else value

    @field_serializer("collocations", "fusions", mode="plain")
    def _sorted_roles(self, value: list[set[str]]) -> list[list[str]]:
        return [sorted(roles) for roles in value]

    def problems(self) -> list[str]:
        """Return all faults of the description, one line each; empty if the job may be submitted."""
        found = self._faults()
        try:
            return found + self._contradictions()
        except Exception:
            if not found:
                raise
            return found  # the other checks need not work with values of a wrong type

    def _contradictions(self) -> list[str]:
        """Return contradictions between values that are valid by themselves."""
        found = role_name_problems(self.workloads)
        found += job_name_problems(self.job_name)
        for role, workload in self.workloads.items():
            found += [f"role {role}: {problem}" for problem in workload.problems()]
            limits = (self.node_number, self.device_per_node)
            found += [f"role {role}: {problem}" for problem in member_problems(workload, *limits)]
        found += size_problems(self.workloads) + call_problems(self.workloads)
        if self.device_type == "GPU":
            found += mask_problems(self.workloads, self.global_env)
        found += placing_problems(self.workloads, self.separations, self.pools, self.collocations)
        found += fusion_problems(self.fusions, self.workloads, self.separations)
        return found + collocation_problems(self.collocations, self.workloads)

    def _faults(self) -> list[str]:
        """Return faults of values that were changed in place, without validation by assignment."""
        found = self.faults(exclude={"workloads"})
        workloads: dict[Any, Any] = self.workloads
        for role, workload in workloads.items():
            if not isinstance(role, str) or not isinstance(workload, BaseWorkloadDesc):
                found.append(f"workloads: {role!r:.80}: {workload!r:.80} must be a role's name and its descriptor")
            else:
                found += [f"role {role}: {problem}" for problem in workload.faults()]
        return found

    def check(self) -> None:
        """Raise ``JobSpecError`` with all of ``problems()``, if there are any."""
        if problems := self.problems():
            raise JobSpecError(problems)

    @property
    def node_num(self) -> int | None:
        """``node_number``, under DLRover's name."""
        return self.node_number

    @property
    def config(self) -> Any:
        """``user_config``, under DLRover's name."""
        return self.user_config

    @property
    def env(self) -> dict[str, str]:
        """``global_env``, under DLRover's name."""
        return self.global_env

    def get_workload(self, role: str) -> WorkloadDesc:
        """Return the description of a role; the same object as in ``workloads``.

        Raises:
            UsageError: the job has no such role.
        """
        try:
            return self.workloads[role]
        except KeyError:
            raise UsageError(f"the job has no role {role!r}.{did_you_mean(str(role), self.workloads)}") from None

    def envs_of(self, role: str) -> dict[str, str]:
        """Return the environment variables of a role's members: ``global_env``, then the role's own."""
        return {**self.global_env, **self.workloads[role].envs}

    def restart_of(self, role: str, scope: str | None = None) -> RestartPolicy:
        """Return the effective restart policy of a role, with all fields set. ``scope`` wins over the description."""
        workload = self.workloads[role]
        elastic = workload.backend == "elastic"
        return effective_policy(elastic, workload.restart, self.restart, workload.max_restarts, scope)

    def names_a_budget(self, role: str) -> bool:
        """True if the job itself sets the number of restarts of a role."""
        workload = self.workloads[role]
        return names_a_budget(workload.restart, self.restart, workload.max_restarts)

    @property
    def main_path(self) -> str:
        """The submitting script, which workers import for entry points in ``__main__``."""
        return main_path()

    def import_roots(self) -> tuple[str, ...]:
        """Return the folders that must be importable in the workers: the parents of the entry points' packages."""
        roots = [workload.resolved.root for workload in self.workloads.values()]
        return tuple(dict.fromkeys(str(root) for root in roots if root is not None))

    def preload_items(self) -> tuple[str, ...]:
        """Return the modules that processes import before they become workers: ``"torch"``,
        ``"transformers:Qwen2ForCausalLM"``."""
        from rlmesh.job.entry_points.preload import find_preload

        if self.preload is not None:
            return self.preload
        return find_preload([workload.resolved for workload in self.workloads.values()])


def job_name_problems(name: object) -> list[str]:
    if name is None or (isinstance(name, str) and _JOB_NAME.fullmatch(name)):
        return []
    return [
        f"job_name: {name!r:.80} must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or a digit"
    ]
