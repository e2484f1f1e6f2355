"""Whatever a job's description is given, the answer is a description or a `JobSpecError`, at once."""

from __future__ import annotations

import enum
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlmesh import (
    CustomWorkloadDesc,
    DLConfig,
    DLJobBuilder,
    ElasticWorkloadDesc,
    ResourceDesc,
    RestartPolicy,
    SimpleWorkloadDesc,
)
from rlmesh.builders.role_builder import ElasticRoleBuilder, SimpleRoleBuilder
from rlmesh.errors import JobSpecError, PlacementError, UsageError
from tests.job import roles


class Odd(enum.Enum):
    THING = 1


JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 10**30, 1.5, float("nan"), float("inf"), "", "x", "x y", "é", "a" * 300, b"x", [], [1],
    ["x"], (), ("a", "b", "c"), {}, {"a": 1}, {1: 2}, {"x": None}, {"x": [8]}, {"x": [10**30]}, set(), object(), int,
    roles.Runner, lambda: 0, Odd.THING, Odd, "\0", "'", "torchrun", "a/b", range(3), 1 + 2j, ...,
)  # fmt: skip
NOT_SETTINGS = {"build", "end", "role_name", "use_pool", "describe"}


def simple() -> Any:
    return DLJobBuilder().role("TRAINER").run(roles.Runner).role("W").run(roles.Plain)


def elastic() -> Any:
    return DLJobBuilder().role("TRAINER").run(roles.Runner).role("W").train(roles.Plain)


def settings(builder: type[Any]) -> list[str]:
    return [name for name in dir(builder) if not name.startswith("_") and name not in NOT_SETTINGS]


def keywords(method: Callable[..., Any]) -> Iterator[str]:
    parameters = list(inspect.signature(method).parameters.items())[1:]
    needed = {name for name, parameter in parameters if parameter.default is parameter.empty and parameter.kind < 2}
    for name, parameter in parameters:
        if needed - {name}:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from ("a", "cpu", "gpu", "hang_s", "max_restarts", "on_error", "window_s")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            yield name


def takes_one(method: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return any(parameter.kind not in (parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY) for parameter in parameters)


@pytest.fixture(autouse=True)
def nothing_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdin", closed)


def refused_or_right(make: Callable[[], object], told: str) -> None:
    try:
        make()
    except (UsageError, PlacementError) as error:
        assert str(error).strip(), told
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("kind", [pytest.param(SimpleRoleBuilder, marks=pytest.mark.slow), ElasticRoleBuilder])
def test_junk_for_every_setting_of_builders_is_refused_or_right(kind: type[Any]) -> None:
    start = elastic if kind is ElasticRoleBuilder else simple
    for name in settings(kind):
        for junk in JUNK:
            if takes_one(getattr(kind, name)):
                refused_or_right(lambda: getattr(start(), name)(junk).build(), f"{name}({junk!r:.40})")  # noqa: B023
            for key in keywords(getattr(kind, name)):
                refused_or_right(
                    lambda: getattr(start(), name)(**{key: junk}).build(),  # noqa: B023
                    f"{name}({key}={junk!r:.40})",
                )


@pytest.mark.parametrize(
    "change",
    [
        lambda b, junk: b.with_groups(a={"total": junk}),
        lambda b, junk: b.with_groups(a={"accelerator": junk}),
        lambda b, junk: b.with_groups(a={"nodes": junk}),
        lambda b, junk: b.with_separation("W", by=junk),
        lambda b, junk: b.with_separation("W", junk),
        lambda b, junk: b.with_collocation("W", junk),
        lambda b, junk: b.with_fusion("W", junk),
        lambda b, junk: b.with_pools({"p": [1]}, {"W": junk}),
        lambda b, junk: b.with_pools({"p": junk}, {"W": "p"}),
        lambda b, junk: b.with_pools({"p": [junk]}, {"W": "p"}),
        lambda b, junk: b.resource(accelerator=junk).with_pools({"p": [2]}, {"W": "p"}),
        lambda b, junk: b.env({"A": junk}),
        lambda b, junk: b.env(junk).env({"A": "1"}),
        lambda b, junk: b.total(junk).per_node(2),
        lambda b, junk: b.mesh(dp=junk).keep_together("dp"),
        lambda b, junk: b.mesh(dp=2).keep_together(junk),
        lambda b, junk: b.role("T").train(roles.Plain).per_node(junk).nnodes(2),
        lambda b, junk: b.role("T").train(roles.Plain).total(junk).nproc_per_node(2),
        lambda b, junk: b.role("T").train(roles.Plain).total(junk).nnodes(2),
        lambda b, junk: b.role("T").run("tests.job.roles", junk),
        lambda b, junk: b.config(junk),
    ],
)
def test_junk_within_settings_is_refused_or_right(change: Callable[[Any, Any], Any]) -> None:
    for junk in JUNK:
        refused_or_right(lambda: change(simple(), junk).build().model_dump_json(), repr(junk)[:40])  # noqa: B023


@pytest.mark.parametrize(
    "kind", [ElasticWorkloadDesc, SimpleWorkloadDesc, CustomWorkloadDesc, ResourceDesc, RestartPolicy, DLConfig]
)
def test_junk_for_every_field_of_descriptions_is_refused_or_right(kind: Any) -> None:
    entry = {"entry_point": "tests.job.roles.Plain"} if "entry_point" in kind.model_fields else {}
    for name in [*kind.model_fields, "nnodes", "nproc_per_node", "num", "module_name", "class_name"]:
        for junk in JUNK:
            refused_or_right(lambda: kind(**{**entry, name: junk}), f"{name}={junk!r:.40}")  # noqa: B023


def test_what_is_changed_after_the_build() -> None:
    for junk in JUNK:
        told = repr(junk)[:40]

        def changed(change: Callable[[Any], object], told: str = told) -> None:
            job = simple().build()
            refused_or_right(lambda: (change(job), job.check(), job.plan({"nodes": [{"cpus": 8}]})), told)

        for name in DLConfig.model_fields:
            changed(lambda job: setattr(job, name, junk))  # noqa: B023
        for name in SimpleWorkloadDesc.model_fields:
            changed(lambda job: setattr(job.workloads["W"], name, junk))  # noqa: B023
        changed(lambda job: job.workloads.update(W=junk))  # noqa: B023
        changed(lambda job: job.workloads["W"].envs.update(x=junk))  # noqa: B023
        changed(lambda job: job.workloads["W"].mesh.update(x=junk))  # noqa: B023
        changed(lambda job: job.workloads["W"].groups.update(x=junk))  # noqa: B023
        changed(lambda job: job.workloads["W"].calls.append(junk))  # noqa: B023
        for name in ("collocations", "fusions", "separations"):
            changed(lambda job: getattr(job, name).append(junk))  # noqa: B023
        changed(lambda job: job.pools.update(x=junk))  # noqa: B023


def test_junk_for_clusters_is_refused_or_right() -> None:
    job = simple().build()
    for junk in JUNK:
        refused_or_right(lambda: job.plan(junk), repr(junk)[:40])  # noqa: B023
        for key in ("name", "count", "cpus", "memory_gib", "gpus", "numa", "nvlink", "agents", "virtual"):
            refused_or_right(lambda: job.plan({"nodes": [{key: junk}]}), f"{key}={junk!r:.40}")  # noqa: B023


@pytest.mark.parametrize("name", ["a b", "é", "x" * 300, "../../elsewhere", 3, "", "a\0b", ["a"]])
def test_wrong_names_of_jobs_are_refused(name: Any) -> None:
    with pytest.raises(JobSpecError, match=r"job_name: .* must be 1 to 64 letters"):
        simple().build().submit(name)
    with pytest.raises(JobSpecError, match=r"job_name: .* must be 1 to 64 letters"):
        simple().build().start(name)


@pytest.mark.parametrize("wrong", [{"run_dir": 3}, {"run_dir": ["a"]}, {"view": 3}, {"view": "x"}, {"view": ["live"]}])
def test_wrong_arguments_of_submit_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        simple().build().submit("wrong", **wrong)


def test_a_number_that_got_out_of_hand_is_told_and_not_planned() -> None:
    with pytest.raises(JobSpecError, match=r"total: .*100000 .*got 1000000000"):
        simple().total(10**9).build()
    with pytest.raises(JobSpecError, match=r"the job has 160000 accelerators in all, more than 100000"):
        simple().total(20_000).resource(accelerator=8).build()
