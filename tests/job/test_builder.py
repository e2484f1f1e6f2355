"""Builders: what a chain describes, and how wrong chains are answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_type

import pytest

from rlmesh import DLJobBuilder, ElasticWorkloadDesc, RLJobBuilder, RLRoleType
from rlmesh.builders.config import DLJob
from rlmesh.builders.rl_builder import RLElasticRoleBuilder, RLSimpleRoleBuilder
from rlmesh.builders.role_builder import ElasticRoleBuilder, SimpleRoleBuilder
from rlmesh.errors import JobSpecError, UsageError
from rlmesh.rl.algorithms import PPO
from rlmesh.rl.trainers.run import Run
from tests.job import roles
from tests.job.test_descriptors import fails

HERE = "tests.job.roles"


def rl_job() -> RLElasticRoleBuilder:
    return RLJobBuilder().trainer(HERE, "Trainer").actor(HERE, "Actor")


def test_type_checkers_follow_the_chain() -> None:
    assert_type(rl_job().rollout(roles.Plain), RLSimpleRoleBuilder)
    assert_type(rl_job().rollout(roles.Plain).total(2).end(), RLJobBuilder)
    assert_type(rl_job().node_num(2), RLJobBuilder)
    assert_type(rl_job().role("X").train(roles.Plain), RLElasticRoleBuilder)
    assert_type(rl_job().workload("X", roles.Plain), RLSimpleRoleBuilder)
    assert_type(DLJobBuilder().train(roles.Plain).nnodes(2), ElasticRoleBuilder[DLJobBuilder])
    assert_type(DLJobBuilder().role("X").run(roles.Plain).total(2), SimpleRoleBuilder[DLJobBuilder])
    assert_type(rl_job().build(), DLJob)


def test_each_kind_of_role_has_its_backend() -> None:
    job = (
        DLJobBuilder()
        .role("A").run(roles.Runner).total(2)
        .role("B").train(roles.Plain).nnodes(2).nproc_per_node(3)
        .role("C").custom(HERE, "Plain")
        .workload("D", roles.Plain)
        .build()
    )  # fmt: skip
    assert {name: w.backend for name, w in job.workloads.items()} == {
        "A": "simple",
        "B": "elastic",
        "C": "custom",
        "D": "simple",
    }
    assert {name: w.total for name, w in job.workloads.items()} == {"A": 2, "B": 6, "C": 1, "D": 1}


def test_rl_roles_have_their_kinds() -> None:
    job = rl_job().critic(HERE, "Actor").rollout(HERE, "Actor").reference(HERE, "Actor").reward(HERE, "Actor").build()
    elastic = {role for role, workload in job.workloads.items() if workload.backend == "elastic"}
    assert elastic == {"ACTOR", "CRITIC"}
    assert set(job.workloads) == {role.name for role in RLRoleType}
    assert rl_job().role(RLRoleType.REWARD).train(HERE, "Actor").build().workloads["REWARD"].backend == "elastic"


def test_train_without_a_role_is_called_elastic() -> None:
    assert list(DLJobBuilder().train(roles.main).build().workloads) == ["ELASTIC"]


def test_a_roles_environment_overrides_the_jobs() -> None:
    job = rl_job().env({"A": "role"}).env({"B": "role"}).global_env({"A": "job", "C": "job"}).global_env().build()
    assert job.envs_of("ACTOR") == {"A": "role", "B": "role", "C": "job"}
    assert job.envs_of("TRAINER") == {"A": "job", "C": "job"}


def test_resources_of_a_role_are_merged() -> None:
    job = (
        RLJobBuilder()
        .device_per_node(2)
        .trainer(HERE, "Trainer")
        .actor(HERE, "Actor")
        .rollout(HERE, "Actor").resource(accelerator=0.4).resource(cpu=2)
        .reward(HERE, "Actor").resource(cpu=1, mem=512)
        .build()
    )  # fmt: skip
    asked = {name: workload.resource for name, workload in job.workloads.items()}
    assert asked["TRAINER"].accelerator == 0
    assert asked["ACTOR"].accelerator == 1
    assert (asked["ROLLOUT"].accelerator, asked["ROLLOUT"].cpu) == (0.4, 2)
    assert (asked["REWARD"].accelerator, asked["REWARD"].memory) == (0, 512)


def test_a_job_that_does_not_speak_of_devices_uses_none() -> None:
    assert rl_job().build().workloads["ACTOR"].resource.accelerator == 0
    assert rl_job().device_type("CPU").build().workloads["ACTOR"].resource.accelerator == 1


def test_roles_are_collocated_by_name_or_all_that_use_accelerators() -> None:
    def chain() -> Any:
        return (
            RLJobBuilder()
            .device_per_node(8)
            .trainer(HERE, "Trainer")
            .actor(HERE, "Actor")
            .rollout(HERE, "Actor")
            .reward(HERE, "Actor").resource(cpu=1)
            .reference(HERE, "Actor")
        )  # fmt: skip

    assert chain().with_collocation("actor", RLRoleType.ROLLOUT).build().collocations == [{"ACTOR", "ROLLOUT"}]
    together = chain().end()
    assert together.with_collocation_all().build().collocations == [{"ACTOR", "ROLLOUT", "REFERENCE"}]
    assert together.with_collocation_all("reference").build().collocations == [{"ACTOR", "ROLLOUT"}]


def test_wrong_collocations_are_all_told() -> None:
    chain = rl_job().device_per_node(8).rollout(HERE, "Actor").reward(HERE, "Actor").end()
    chain.with_collocation("ACTOR", "ROLLOUT").with_collocation("ROLLOUT", "REWRAD").with_collocation("REWARD")
    fails(
        chain.build,
        "collocation of REWRAD, ROLLOUT: the job has no role 'REWRAD'. Did you mean 'REWARD'?",
        "collocation of REWRAD, ROLLOUT: role ROLLOUT is in another collocation already",
        "collocation of REWARD: needs at least two roles",
    )


def test_collocating_all_needs_roles_that_use_accelerators() -> None:
    fails(rl_job().with_collocation_all().build, "needs at least two roles that use accelerators, and there is none")
    chain = rl_job().device_per_node(2).reward(roles.Actor).resource(cpu=1).with_collocation_all()
    fails(chain.build, "needs at least two roles that use accelerators, and there is ACTOR")


def test_shares_of_collocated_roles_must_fit_one_accelerator() -> None:
    chain = rl_job().resource(accelerator=0.7).rollout(HERE, "Actor").resource(accelerator=0.4)
    fails(chain.with_collocation("ACTOR", "ROLLOUT").build, "add up to 1.1: they share one")


def test_node_checks_can_be_skipped() -> None:
    actor = rl_job().skip_node_check().build().workloads["ACTOR"]
    assert isinstance(actor, ElasticWorkloadDesc)
    assert actor.comm_pre_check is False


@pytest.mark.parametrize(
    ("builder", "name", "message"),
    [
        (RLJobBuilder(), "actr", "RLJobBuilder has no method 'actr'. Did you mean 'actor'?"),
        (DLJobBuilder(), "actor", "DLJobBuilder has no method 'actor'. Valid: build, by_run_cmd, config"),
        (rl_job(), "totl", "RLElasticRoleBuilder has no method 'totl'. Did you mean 'total'?"),
        (rl_job().rollout("a.B"), "nnodes", "role ROLLOUT: nnodes() is for elastic roles, which .train(...) defines"),
        (DLJobBuilder().role("X").run("a.B"), "rollout", "SimpleRoleBuilder has no method 'rollout'."),
    ],
)
def test_unknown_methods_are_answered_with_the_nearest(builder: Any, name: str, message: str) -> None:
    assert not hasattr(builder, name)
    with pytest.raises(UsageError) as caught:
        getattr(builder, name)
    assert message in str(caught.value)


def test_all_faults_are_reported_at_once() -> None:
    chain = (
        RLJobBuilder()
        .device_type("TPU")
        .node_num(0)
        .global_env({"DEBUG": True})  # type: ignore[dict-item]
        .trainer(HERE, "Trainr")
        .actor(f"{HERE}.NeedsArguments").nnodes(2).nproc_per_node(2).total(5)
        .rollout("{P}.ppo_rollout.VLLMActor").resource(gpus=1)
        .critic(3)  # type: ignore[arg-type]
        .with_collocation("actor", "rolout")
    )  # fmt: skip
    fails(
        chain.build,
        "device_type: input should be 'CPU' or 'GPU' (got 'TPU')",
        "node_number: input should be greater than or equal to 1 (got 0)",
        "global_env: DEBUG=True (bool) must be text, such as 'True'",
        "role TRAINER: entry_point: module tests.job.roles",
        "role ACTOR: total=5 contradicts nnodes=2 and nproc_per_node=2",
        "role ROLLOUT: resource.gpus: there is no such key.",
        "role ROLLOUT: entry_point: '{P}.ppo_rollout.VLLMActor' holds a brace",
        "role CRITIC: entry_point: 3 (int) is not an entry point",
        "collocation of ACTOR, rolout: the job has no role 'rolout'. Did you mean 'ROLLOUT'?",
    )


def test_roles_without_entry_point_are_refused() -> None:
    fails(DLJobBuilder().role("A").build, "role A: has no entry point: follow .role('A') with .run(...)")
    fails(DLJobBuilder().role("A").role("B").run(roles.Runner).build, "role A: has no entry point")
    fails(RLJobBuilder().actor(class_name="Actor").build, "role ACTOR: entry_point: is missing: give a class")
    fails(DLJobBuilder().run(roles.Runner).build, "run(): name the role first: .role('WORKER').run(...)")


def test_rl_roles_without_a_class_are_the_built_in_ones() -> None:
    job = (
        RLJobBuilder().node_num(3).device_per_node(2).config({"model": "somewhere"})
        .trainer().actor().total(2).per_node(1).rollout().total(2).per_node(1).reference().total(2).critic().build()
    )  # fmt: skip
    assert {role: workload.entry_point for role, workload in job.workloads.items()} == {
        "TRAINER": "rlmesh.rl.trainers.trainer.Trainer",
        "ACTOR": "rlmesh.rl.roles.actor.ActorRole",
        "ROLLOUT": "rlmesh.rl.roles.rollout.RolloutRole",
        "REFERENCE": "rlmesh.rl.roles.reference.ReferenceRole",
        "CRITIC": "rlmesh.rl.roles.critic.CriticRole",
    }  # fmt: skip
    fails(RLJobBuilder().actor().rollout().build, "config: ACTOR, ROLLOUT without a class are built-in roles")
    fails(RLJobBuilder().config({"c1": "v1"}).actor().build, "the configuration is dict")
    run = Run(model="somewhere", data="rows.jsonl", rewards=[len_of], algorithm=PPO())
    builder = RLJobBuilder().config(run)
    builder.trainer()
    fails(builder.actor().rollout().build, "role CRITIC: is missing: PPO needs .critic()")
    builder = RLJobBuilder().config(replace(run, algorithm=PPO(kl=0.1)))
    builder.trainer()
    fails(
        builder.actor().critic().build, "role ROLLOUT: is missing: PPO needs .rollout()",
        "role REFERENCE: is missing: PPO needs .reference()",
    )  # fmt: skip


def len_of(response: str) -> float:
    return float(len(response))


def test_role_names_are_unique_and_valid() -> None:
    chain = DLJobBuilder().workload("A", roles.Runner).workload("A", roles.Runner).workload("a", roles.Runner)
    fails(chain.workload("B:1", roles.Runner).build, "A: is defined twice", "a: differs from role A", "role 'B:1'")


def test_an_rl_job_has_an_actor_and_a_job_has_roles() -> None:
    fails(RLJobBuilder().trainer(roles.Trainer).build, "role ACTOR: is missing: an RL job needs .actor(...)")
    fails(DLJobBuilder().build, "workloads: the job has no roles: add one, such as")


def test_members_that_exceed_the_job_s_nodes_and_devices_are_refused() -> None:
    chain = rl_job().nnodes(3).nproc_per_node(2).resource(accelerator=3).node_num(2).device_per_node(2)
    fails(
        chain.build,
        "role ACTOR: resource.accelerator: a member asks for 3 accelerators, and device_per_node is 2",
        "role ACTOR: nnodes: 6 members, 2 on a node, need 3 nodes, and node_num is 2",
    )


def test_a_problem_reads_as_text() -> None:
    with pytest.raises(JobSpecError) as caught:
        RLJobBuilder().build()
    assert str(caught.value).startswith("the job description has 2 problems:\n  1. ")
