"""Job descriptions: any user's configuration, changes after build(), submit's own checks."""

from __future__ import annotations

import argparse
import json
import math
import pickle
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from omegaconf import OmegaConf

from rlmesh import DLConfig, DLJobBuilder, ElasticWorkloadDesc, ResourceDesc, RLJobBuilder, SimpleWorkloadDesc
from rlmesh.builders.config import DLJob
from rlmesh.errors import JobSpecError, UsageError
from rlmesh.job.description.checks import checks_nodes
from rlmesh.job.description.restart_policy import RestartPolicy
from rlmesh.job.description.time_limits import TimeLimits
from rlmesh.job.jsonable import jsonable
from tests.job import roles
from tests.job.test_descriptors import fails

HERE = "tests.job.roles"


class Kind(Enum):
    PPO = "ppo"
    OTHER = object()


@dataclass
class Settings:
    lr: float = 0.5
    data: Path = Path("a/b")
    kinds: list[Kind] = field(default_factory=lambda: [Kind.PPO, Kind.OTHER])


class Model(pydantic.BaseModel):
    settings: Any = None
    lr: float = math.inf


class Opaque:
    def __repr__(self) -> str:
        return "<opaque>"


CONFIGS = [
    ({"c1": "v1", 2: {"x": (1, 2)}}, {"c1": "v1", "2": {"x": [1, 2]}}),
    (argparse.Namespace(lr=1, tags={"b", "a"}), {"lr": 1, "tags": ["a", "b"]}),
    (Settings(), {"lr": 0.5, "data": "a/b", "kinds": ["ppo", "OTHER"]}),
    (Model(settings=Settings()), {"settings": {"lr": 0.5, "data": "a/b", "kinds": ["ppo", "OTHER"]}, "lr": "inf"}),
    (OmegaConf.create({"a": 1, "b": ["${a}", 2]}), {"a": 1, "b": [1, 2]}),
    (OmegaConf.create({"a": "${missing}"}), {"a": "${missing}"}),
    ({"n": np.float32(0.5), "array": np.arange(3)}, {"n": 0.5, "array": [0, 1, 2]}),
    (Opaque(), "<opaque>"),
    (None, {}),
    ([1, None, True, float("nan")], [1, None, True, "nan"]),
]


@pytest.mark.parametrize(("config", "expected"), CONFIGS)
def test_any_configuration_can_be_printed(config: Any, expected: Any) -> None:
    job = RLJobBuilder().config(config).actor(roles.Actor).build()
    assert json.loads(job.model_dump_json(indent=2))["user_config"] == expected
    if config is not None:
        assert job.user_config is config


def test_a_cycle_ends() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    assert "…" in json.dumps(jsonable(cycle), ensure_ascii=False)


def test_a_description_survives_json_and_pickle() -> None:
    job = (
        RLJobBuilder()
        .config({"a": 1})
        .node_num(2)
        .actor(roles.Actor).nnodes(2)
        .rollout(roles.Plain)
        .with_collocation("ACTOR", "ROLLOUT")
        .build()
    )  # fmt: skip
    assert DLConfig.model_validate_json(job.model_dump_json()) == job
    assert pickle.loads(pickle.dumps(job)) == job


def test_a_description_can_be_written_by_hand() -> None:
    config = DLConfig(
        workloads={
            "TRAINER": SimpleWorkloadDesc(entry_point=roles_text("Trainer"), resource=ResourceDesc(cpu=4)),
            "ACTOR": ElasticWorkloadDesc(entry_point=roles_text("Actor"), total=2),
        },
        user_config={"a": 1},
    )
    config.check()
    assert isinstance(config, DLJob)
    assert (config.call_timeout_s, config.restart.scope, config.device_type) == (1800.0, None, "GPU")


def roles_text(name: str) -> str:
    return f"{HERE}.{name}"


def test_all_faults_of_a_description_written_by_hand_are_told() -> None:
    config: Any = DLConfig
    fails(
        lambda: config(
            workloads={
                "A": {"backend": "elastic", "entry_point": "a.B", "totl": 1, "resource": {"cpu": -1}},
                "B": {"backend": "elastik", "entry_point": "a.B"},
            },
            device_typ="CPU",
            call_timeout_s=0,
        ),
        "A.elastic.totl: there is no such key. Did you mean 'total'?",
        "A.elastic.resource.cpu: input should be greater than or equal to 0",
        "workloads.B",
        "device_typ: there is no such key. Did you mean 'device_type'?",
        "call_timeout_s: input should be greater than 0",
    )


def test_unknown_restart_scopes_are_named() -> None:
    fails(lambda: config_of(restart="nevr"), "there is no restart scope 'nevr'. Did you mean 'never'?")
    fails(
        lambda: config_of(restart={"max_restart": 1}), "max_restart: there is no such key. Did you mean 'max_restarts'?"
    )


def config_of(**fields: Any) -> DLConfig:
    return DLConfig(**fields)


@pytest.mark.parametrize(
    ("elastic", "role", "job", "launch", "scope"),
    [
        (False, None, "", None, "member"),
        (True, None, "", None, "role"),
        (True, None, "member", None, "role"),
        (False, None, "never", None, "never"),
        (False, "role", "never", None, "role"),
        (True, "job", "never", None, "job"),
        (False, "role", "job", "member", "member"),
        (True, "never", "never", "member", "role"),
    ],
)
def test_the_policy_that_holds(elastic: bool, role: str | None, job: str, launch: str | None, scope: str) -> None:
    kind: Any = ElasticWorkloadDesc if elastic else SimpleWorkloadDesc
    workload: Any = kind(entry_point=roles_text("Actor"), restart=role)
    config = config_of(workloads={"A": workload}, **({"restart": job} if job else {}))
    assert config.restart_of("A", launch).scope == scope
    assert not [problem for problem in config.problems() if "restart" in problem]


def test_members_of_a_group_do_not_restart_alone() -> None:
    workload: Any = ElasticWorkloadDesc(entry_point=roles_text("Actor"), restart=RestartPolicy(scope="member"))
    (problem,) = config_of(workloads={"A": workload}).problems()
    assert "restart: scope 'member' cannot work for an elastic role" in problem


def test_a_wrong_job_name_is_refused() -> None:
    job = RLJobBuilder().actor(roles.Actor).build()
    job.job_name = "a/b"
    fails(job.check, "job_name: 'a/b' must be 1 to 64 letters")


def test_changes_after_build_are_checked_again() -> None:
    job = RLJobBuilder().trainer(roles.Trainer).actor(roles.Actor).nnodes(2).nproc_per_node(2).build()
    for workload in job.workloads.values():
        if workload.backend == "elastic":
            workload.comm_pre_check = False
    job.check()
    job.workloads["ACTOR"].total = 3
    job.workloads["ACTOR"].envs["FLAG"] = True  # type: ignore[assignment]
    job.workloads["TRAINER"].entry_point = roles_text("Trainr")
    job.workloads["X Y"] = SimpleWorkloadDesc(entry_point=roles_text("Plain"))
    job.collocations.append({"ACTOR", "CRITC"})
    fails(
        job.check,
        "role ACTOR: envs: FLAG=True (bool) must be text",
        "role 'X Y': a name must be",
        "role ACTOR: per_node: 3 members cannot be split into nodes of 2",
        "role TRAINER: entry_point: module tests.job.roles",
        "collocation of ACTOR, CRITC: the job has no role 'CRITC'.",
    )
    with pytest.raises(JobSpecError):
        job.submit("never-starts")


@pytest.mark.parametrize(
    ("wanted", "checked"), [((True, True), True), ((False, True), True), ((False, False), False), ((), True)]
)
def test_nodes_are_checked_unless_every_elastic_role_does_without(wanted: tuple[bool, ...], checked: bool) -> None:
    """A role that needs no check of the nodes does not switch it off for the others."""
    entry = roles_text("Plain")
    workloads: dict[str, Any] = {"TRAINER": SimpleWorkloadDesc(entry_point=entry)}
    workloads |= {f"R{i}": ElasticWorkloadDesc(entry_point=entry, comm_pre_check=on) for i, on in enumerate(wanted)}
    assert checks_nodes(workloads) is checked


async def test_submit_inside_a_loop_names_start() -> None:
    job = RLJobBuilder().trainer(roles.Trainer).actor(roles.Actor).build()
    with pytest.raises(UsageError, match=r"async with job\.start\(\.\.\.\) as handle"):
        job.submit("never-starts")
    with pytest.raises(UsageError, match=r"start"):
        job.submit("never-starts", blocking=False)


def test_an_unknown_view_is_refused_before_the_start() -> None:
    job = RLJobBuilder().trainer(roles.Trainer).actor(roles.Actor).build()
    with pytest.raises(UsageError, match=r"there is no view 'lives'\. Did you mean 'live'\?"):
        job.submit("never-starts", view="lives")  # type: ignore[call-overload]


def test_a_job_that_nothing_ends_is_not_submitted() -> None:
    job = DLJobBuilder().role("A").run(roles.Plain).build()
    with pytest.raises(JobSpecError, match="no role has a run\\(\\) for whose return the job could wait"):
        job.submit("never-starts")
    job = DLJobBuilder().role("TRAINER").run(roles.Plain).role("B").run(roles.Runner).build()
    with pytest.raises(JobSpecError, match=r"role TRAINER: entry_point: .*Plain has no run\(\)"):
        job.submit("never-starts")
    job = DLJobBuilder().role("A").run(roles.Runner).not_driver().build()
    with pytest.raises(JobSpecError, match="no role has a run"):
        job.submit("never-starts")


def test_what_workers_must_be_able_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", roles.__file__, raising=False)
    job = RLJobBuilder().actor(roles.Actor).rollout("json.decoder", "JSONDecoder").build()
    assert job.import_roots() == (str(Path(roles.__file__).parents[2]),)
    assert job.main_path == roles.__file__


def test_limits_of_a_job_are_kept_and_those_of_the_launch_win() -> None:
    job = RLJobBuilder().limits(hang_s=5).actor(roles.Actor).limits(setup_s=7.5).build()
    assert (job.limits.hang_s, job.limits.setup_s, job.limits.teardown_s) == (5.0, 7.5, 60.0)
    assert job.limits.under(TimeLimits(hang_s=1.0)) == TimeLimits(hang_s=1.0, setup_s=7.5), "the launch wins"
    fails(lambda: config_of(limits={"hang": 1}), "limits: there is no limit 'hang'. Did you mean 'hang_s'?")
    fails(lambda: config_of(limits={"hang_s": 0}), "limits: hang_s=0: it is a number of seconds above 0")
    assert DLConfig(**json.loads(job.model_dump_json())).limits == job.limits
