"""What the processes of members are told."""

from __future__ import annotations

from dataclasses import replace

from rlmesh.agent.protocol import WorkerSpec
from rlmesh.job.context import COLLOCATION_ENV
from rlmesh.master.decisions.scheduler import Scheduler, Site, by_node
from rlmesh.master.jobspec import JobSpec
from rlmesh.placement.demand import JobDemand, RoleDemand
from tests.master.bench import job, node, role

SITE = Site("00ff", "ipc:///tmp/s/master")
NODES = [node(0, 2), node(1, 2)]


def specs(spec: JobSpec) -> dict[str, WorkerSpec]:
    scheduler = Scheduler(spec, SITE)
    plan = scheduler.plan(NODES)
    ports = dict.fromkeys(scheduler.group_leaders(plan), 29500)
    made = [scheduler.worker_spec(p, NODES[p.node_rank], 1, ports) for p in plan.placements]
    return {f"{s.role}:{s.rank}": s for s in made}


def test_elastic_members_get_the_environment_of_torchrun() -> None:
    spec = job(role("ACTOR", 4, "elastic"), role("A", 2), nnodes=2)
    demand = JobDemand((RoleDemand("ACTOR", 4, 2, True, 1000), RoleDemand("A", 2)), device_type="CPU")
    made = specs(replace(spec, demand=demand))
    env = made["ACTOR:3"].env
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"
    }  # fmt: skip
    assert (env["GROUP_RANK"], env["NODE_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "1", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert env["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert env["TORCHELASTIC_ERROR_FILE"] == f"{made['ACTOR:3'].socket_dir}/error-ACTOR-3-1.json"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "RANK" not in made["A:0"].env
    assert [d.index for d in made["ACTOR:3"].devices] == [1]


def test_members_of_a_collocation_know_it() -> None:
    made = specs(job(role("A"), role("B"), role("C"), collocations=(("A", "B"),)))
    assert made["A:0"].env[COLLOCATION_ENV] == "A,B"
    assert made["A:0"].devices == made["B:0"].devices
    assert COLLOCATION_ENV not in made["C:0"].env


def test_specs_name_the_job_and_its_folders() -> None:
    made = specs(job(role("A")))["A:0"]
    assert (made.log_path, made.socket_dir, made.key_hex) == ("/runs/toy/logs/A-0.log", "/tmp/n0", "00ff")
    assert (made.incarnation, made.node_name) == (1, "node-0")


def test_members_are_listed_by_node() -> None:
    plan = Scheduler(job(role("A", 2), nnodes=2), SITE).plan(NODES)
    assert by_node(plan) == {0: (("A", 0),), 1: (("A", 1),)}
