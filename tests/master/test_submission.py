"""From a job description to what master and agents are told."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlmesh.builders.config import DLConfig
from rlmesh.driver.options import Cluster, LaunchOptions, ambient, effective
from rlmesh.driver.submission import agent_configs, cluster_for, demand_of, expected_nodes, job_spec, slots_asked
from rlmesh.errors import JobSpecError, LaunchError
from rlmesh.job.description.restart_policy import RestartPolicy
from rlmesh.master.jobspec import JobSpec, TimeLimits
from rlmesh.placement.planner import make_plan
from rlmesh.run_directory.workspace import Hold, Workspace


class Role:
    def run(self) -> None: ...


ENTRY = f"{__name__}.Role"


def ppo(**fields: object) -> DLConfig:
    """The shape of the usual PPO job: shares, whole devices, a group, a trainer that asks for cores."""
    return DLConfig.model_validate({
        "workloads": {
            "TRAINER": {"backend": "simple", "entry_point": ENTRY, "resource": {"cpu": 4}},
            "ACTOR": {"backend": "elastic", "entry_point": ENTRY, "nnodes": 1, "nproc_per_node": 2,
                      "resource": {"accelerator": 1}},
            "CRITIC": {"backend": "elastic", "entry_point": ENTRY, "resource": {"accelerator": 0.4}},
            "REWARD": {"backend": "simple", "entry_point": ENTRY, "resource": {"accelerator": 0.6}},
            "ROLLOUT": {"backend": "simple", "entry_point": ENTRY, "total": 2, "envs": {"A": "role"},
                        "resource": {"accelerator": 1}},
        },
        "device_type": "CPU",
        "global_env": {"A": "job", "B": "job"},
        **fields,
    })  # fmt: skip


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    hold = Hold(tmp_path)
    hold.release()
    return Workspace("j-1", tmp_path / "run", tmp_path / "sockets", hold, b"k" * 32)


def spec_of(
    config: DLConfig, cluster: Cluster, space: Workspace, max_restarts: int | None = None
) -> JobSpec:  # fmt: skip
    return job_spec(config, "toy", demand_of(config), cluster, space, limits=TimeLimits(), restart=None,
                    max_restarts=max_restarts, submitted_at=1.0, grace_s=5.0)  # fmt: skip


def test_slots_suffice_on_this_machine() -> None:
    config = ppo()
    demand = demand_of(config)
    cluster = cluster_for(config, demand, None)
    nodes = expected_nodes(cluster)
    assert nodes is not None
    assert cluster.devices_per_node == slots_asked(demand) == 6
    assert len(make_plan(demand, nodes).placements) == 7


def test_declared_devices_and_given_clusters_are_kept() -> None:
    config = ppo(device_per_node=5)
    assert cluster_for(config, demand_of(config), None).devices_per_node == 5
    given = Cluster(("a", "b"), 3)
    assert cluster_for(config, demand_of(config), given) is given


@pytest.mark.parametrize("gpus", [True, False])
def test_a_job_with_gpus_is_told_that_virtual_devices_are_none(
    gpus: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"] if gpus else []))
    config, given = ppo(device_type="GPU"), Cluster(("a",), 2)
    assert cluster_for(config, demand_of(config), given) is given
    told = [record.getMessage() for record in caplog.records]
    assert told == [] if not gpus else "2 devices of each node are virtual" in told[0]
    cluster_for(ppo(), demand_of(ppo()), given)
    assert len(caplog.records) == len(told), "nothing is told to jobs without GPUs"


def test_collocated_roles_are_in_the_order_of_the_job() -> None:
    config = ppo(collocations=[{"ROLLOUT", "ACTOR"}])
    assert demand_of(config).collocations == (("ACTOR", "ROLLOUT"),)


def test_specs_carry_environment_and_configuration(space: Workspace) -> None:
    config = ppo(user_config={"lr": 0.1})
    spec = spec_of(config, Cluster(("a", "b"), 4), space)
    assert spec.role("ROLLOUT").env == {"A": "role", "B": "job"}
    assert spec.role("TRAINER").env == {"A": "job", "B": "job"}
    assert spec.drivers() == ("TRAINER",)
    first, second = agent_configs(spec, Cluster(("a", "b"), 4), space, ("torch",), config.global_env)
    assert (first.start_master, second.start_master) == (True, False)
    assert first.socket_dir != second.socket_dir
    assert first.master_endpoint == second.master_endpoint == f"unix://{first.socket_dir}/master"
    assert (second.preload, second.env, second.virtual_devices) == (("torch",), {"A": "job", "B": "job"}, 4)


def test_max_restarts_of_the_launch_holds_where_the_job_names_no_number(space: Workspace) -> None:
    config = ppo()
    config.workloads["ACTOR"].max_restarts = 7
    config.workloads["ROLLOUT"].restart = RestartPolicy(scope="role")
    rules = {role.name: role.restart for role in spec_of(config, Cluster(("a",), 6), space, 2).roles}
    assert (rules["ACTOR"].max_restarts, rules["ACTOR"].of_job) == (7, None)
    assert (rules["ROLLOUT"].scope, rules["ROLLOUT"].max_restarts, rules["ROLLOUT"].of_job) == ("role", 2, 2)
    assert rules["TRAINER"].of_job == 2
    rules = {role.name: role.restart for role in spec_of(config, Cluster(("a",), 6), space, 0).roles}
    assert (rules["ROLLOUT"].scope, rules["ACTOR"].scope) == ("never", "role")
    config = ppo(restart=RestartPolicy(max_restarts=5))
    assert {role.restart.of_job for role in spec_of(config, Cluster(("a",), 6), space, 2).roles} == {None}


def test_configuration_that_cannot_be_sent_is_named(space: Workspace) -> None:
    with pytest.raises(JobSpecError, match=r"\.config\(\.\.\.\) \(dict\) cannot be sent.*lock"):
        spec_of(ppo(user_config={"lock": threading.Lock()}), Cluster(("a",), 4), space)


def test_workspace_is_private_short_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    space = Workspace.create("my-job", None, tmp_path)
    try:
        space.write_job(spec_of(ppo(), Cluster(("a",)), space), 2)
        assert space.socket_dir.stat().st_mode & 0o777 == 0o700
        assert space.job_path.stat().st_mode & 0o777 == 0o600
        assert len(space.master_endpoint) < 100
        assert space.run_dir.parent == tmp_path
        assert space.run_dir.name.startswith("my-job-")
        assert (space.run_dir / "logs").is_dir()
        assert str(long) not in space.master_endpoint
    finally:
        space.remove_sockets()
    assert not space.socket_dir.exists()


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LaunchError, match=r"the run directory runs/my-job-.* cannot be made"):
        Workspace.create("my-job", None, None)


def test_options_around_the_script_win_and_leave_the_rest() -> None:
    mine = LaunchOptions(view="none", run_dir=Path("mine"))
    with ambient(LaunchOptions(view="plain")), ambient(LaunchOptions(view="live", cluster=Cluster(("n",)))):
        result = effective(mine)
    assert (result.view, result.run_dir, result.cluster) == ("plain", Path("mine"), Cluster(("n",)))
    assert effective(mine) == mine


@pytest.mark.case("s08")
def test_what_a_call_says_wins_over_the_programs_own_block_and_not_over_the_launcher() -> None:
    mine, silent = LaunchOptions(view="plain"), LaunchOptions()
    limits = TimeLimits(setup_s=7.0)
    cluster = LaunchOptions(view="none", cluster=Cluster(("n",)), limits=limits)
    with ambient(cluster, yields=True):
        assert (effective(mine).view, effective(silent).view) == ("plain", "none")
        assert (effective(mine).cluster, effective(mine).limits) == (Cluster(("n",)), limits)
    with ambient(LaunchOptions(view="live")), ambient(cluster, yields=True):
        assert effective(mine).view == "live"
