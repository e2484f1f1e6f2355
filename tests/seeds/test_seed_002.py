"""Document 002, multi-role training: its code blocks build, print, submit, and call each other."""

# mypy: allow-untyped-calls, disable-error-code="arg-type, call-arg"
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmesh import DLConfig, rpc
from rlmesh.runtime.rpc import exported
from rlmesh.testing import LocalCluster
from tests.seeds.openrlhf.ppo import main, remote_call_signatures
from tests.seeds.openrlhf.ppo.ppo_rollout import VLLMActor

PACKAGE = "tests.seeds.openrlhf.ppo"
COMMAND = "--actor_num_gpus_per_node 2 --vllm_num_engines 2"


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_prints_the_job_and_submits_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DLConfig, "submit", lambda *_: pytest.fail("a dry run was submitted"))
    main.submit(main.parse_args([*COMMAND.split(), "--dry_run"]))
    job = printed(capsys)
    assert job["user_config"]["vllm_num_engines"] == 2
    described = {
        role: (w["backend"], w["entry_point"], w["total"], w["per_node"], w["resource"]["accelerator"])
        for role, w in job["workloads"].items()
    }
    assert described == {
        "TRAINER": ("simple", f"{PACKAGE}.ppo_trainer.PPOTrainerActor", 1, None, 0),
        "ACTOR": ("elastic", f"{PACKAGE}.ppo_actor.PolicyModelActor", 2, 2, 1),
        "CRITIC": ("elastic", f"{PACKAGE}.ppo_critic.CriticModelRayActor", 1, 1, 0.4),
        "ROLLOUT": ("simple", f"{PACKAGE}.ppo_rollout.VLLMActor", 2, None, 1),
        "REFERENCE": ("elastic", f"{PACKAGE}.ppo_reference.PPOReferenceActor", 1, 1, 0.4),
        "REWARD": ("elastic", f"{PACKAGE}.ppo_reward.RewardModelRayActor", 1, 1, 0.4),
    }
    assert job["workloads"]["TRAINER"]["resource"]["cpu"] == 4
    assert all(w["comm_pre_check"] for w in job["workloads"].values() if w["backend"] == "elastic")


def test_options_of_the_command_line_change_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    main.submit(main.parse_args(["--dry_run", "--skip_node_check", "--init_kl_coef", "0"]))
    job = printed(capsys)
    assert "REFERENCE" not in job["workloads"]
    checks = {role: w["comm_pre_check"] for role, w in job["workloads"].items() if w["backend"] == "elastic"}
    assert checks == {"ACTOR": False, "CRITIC": False, "REWARD": False}


def test_submit_gets_the_job_s_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Any] = []
    monkeypatch.setattr(DLConfig, "submit", lambda job, name: submitted.append(name))
    main.submit(main.parse_args(["--job_name", "other"]))
    assert submitted == ["other"]


def test_methods_are_named_by_declared_functions() -> None:
    class Engine:
        @rpc(remote_call_signatures.vllm_wakeup)
        def wake_up(self) -> None: ...

        @rpc(remote_call_signatures.actor_forward)
        def forward(self, sequences: Any, action_mask: Any, attention_mask: Any) -> Any: ...

    assert set(exported(Engine())) == {"vllm_wakeup", "actor_forward"}
    assert set(exported(VLLMActor())) == {
        "vllm_wakeup", "vllm_generate", "vllm_sleep", "weight_sync", "end_job",
    }  # fmt: skip


def test_the_job_runs(tmp_path: Path) -> None:
    """The whole diagram over live members; the trainer's own checks fail the job if anything is wrong."""
    with LocalCluster(nodes=1, devices_per_node=6, run_root=tmp_path):
        main.submit(main.parse_args([*COMMAND.split(), "--skip_node_check"]))
    (run_dir,) = tmp_path.iterdir()
    assert {path.name for path in run_dir.glob("last-*")} == {"last-ACTOR:0", "last-ACTOR:1", "last-CRITIC:0"}
