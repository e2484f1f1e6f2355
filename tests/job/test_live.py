"""Jobs that really run: the ways to submit one, and the kinds of entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmesh import DLJobBuilder, RoleGroup
from rlmesh.errors import JobFailed
from rlmesh.testing import LocalCluster
from tests.job import serving


async def test_start_inside_a_loop(tmp_path: Path) -> None:
    job = DLJobBuilder().role("QUICK").run(serving.Quick).build()
    with LocalCluster(devices_per_node=1):
        async with job.start("in-a-loop", run_dir=tmp_path / "run") as handle:
            result = await handle
    assert (result.status.stage, result.run_dir) == ("succeeded", tmp_path / "run")
    assert '"done"' in (tmp_path / "run" / "metrics.jsonl").read_text()


async def test_a_job_is_joined_by_who_started_it(tmp_path: Path) -> None:
    job = DLJobBuilder().role("ECHO").run(serving.Echo).total(2).role("ENDLESS").run(serving.Endless).build()
    with LocalCluster(devices_per_node=1, run_root=tmp_path):
        async with job.start("serving") as handle:
            async with handle.join() as runtime:
                group = RoleGroup[serving.Echo]("ECHO", runtime=runtime)
                assert await group.call(serving.Echo.echo, "here") == ["ECHO:0 here", "ECHO:1 here"]
            assert not handle.done()
        with pytest.raises(JobFailed, match="the block of start"):
            async with handle.join():
                pass


def test_submit_without_waiting_then_stop(tmp_path: Path) -> None:
    job = DLJobBuilder().role("ENDLESS").run(serving.Endless).total(2).build()
    with LocalCluster(devices_per_node=1, run_root=tmp_path):
        handle = job.submit("endless", blocking=False)
        with pytest.raises(TimeoutError):
            handle.result(0.2)
        handle.stop("enough")
        with pytest.raises(JobFailed, match="enough"):
            handle.result(30)


def test_a_torchrun_command_and_a_function_run_in_one_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], *(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')), flush=True)\n"
    )
    job = (
        DLJobBuilder()
        .by_run_cmd(f"torchrun --nnodes=2 --nproc_per_node=1 {script} --lr 1")
        .role("FUNCTION")
        .run(serving.function)
        .resource(cpu=1)
        .build()
    )
    with LocalCluster(nodes=2, devices_per_node=1):
        run_dir = job.submit("kinds", run_dir=tmp_path / "run").run_dir
    for rank in (0, 1):
        assert f"['--lr', '1'] {rank} 2 0" in (run_dir / "logs" / f"ELASTIC-{rank}.log").read_text()
    assert "function of" in (run_dir / "logs" / "FUNCTION-0.log").read_text()
