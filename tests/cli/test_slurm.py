"""``rlmesh launch --slurm`` and launch as a task, as far as they need no Slurm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from rlmesh.cli import main as cli
from rlmesh.cli.commands.launch import add_options
from rlmesh.cli.launching.slurm import StepPlace, _output_of, asks_for_sbatch
from rlmesh.driver.options import LaunchOptions
from rlmesh_launcher.slurm import Task


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.py"
    path.write_text("print('ran')\n")
    return path


def test_a_dry_run_prints_the_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes=2", "--gpus-per-node", "4", "--time", "1:00:00", "--view", "plain", "--grace=9", "--dry-run"]
    assert cli.main(["launch", "--slurm", *words, "job.py", "--", "--lr", "1"]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=4\n" in said
    assert f"{sys.executable} -m rlmesh.cli.main launch --view plain --grace=9 job.py -- --lr 1 &" in said
    assert "--slurm" not in said
    assert "--dry-run" not in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--partitoin=x", "job.py"], "Did you mean --partition?"),
        (["nojob.py"], "there is no script nojob.py"),
        (["--nodes=2"], "no script to run"),
        (["--nnodes=2", "--node-rank", "0", "job.py"], "leave out --nnodes, --node-rank (sbatch has --nodes)"),
        (["--hosts", "hosts.toml", "job.py"], "leave out --hosts (sbatch has --nodelist)"),
        (["--chdir=elsewhere", "job.py"], "there is no script job.py (in "),
        (["--no-kill=on", "job.py"], "--no-kill=on: give nothing or off"),
    ],
)
def test_wrong_use_is_told(words: list[str], why: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--slurm", *words]) == 2
    assert why in capsys.readouterr().err


def test_the_script_is_looked_for_where_the_job_starts(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script.parent / "elsewhere").mkdir()
    script.rename(script.parent / "elsewhere" / "job.py")
    assert cli.main(["launch", "--slurm", "-D", "elsewhere", "--dry-run", "job.py"]) == 0
    assert "#SBATCH --chdir=elsewhere\n" in capsys.readouterr().out


def test_without_slurm_there_is_a_hint(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["launch", "--slurm", "job.py"]) == 1
    assert "no sbatch on PATH" in capsys.readouterr().err


def test_the_option_belongs_before_the_script() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)

    def asks(line: str) -> bool:
        return asks_for_sbatch(line.split(), parser)

    assert asks("--view plain --slurm job.py")
    assert asks("-N2 --time 8:00 --slurm -m jobs.main")
    assert asks("--what --slurm job.py"), "what nobody knows is for sbatch's list of options"
    assert not asks("job.py --slurm")
    assert not asks("-m jobs.main --slurm")
    assert not asks("-- --slurm")
    assert not asks("job.py")


def test_a_batch_script_of_several_nodes_is_told_to_use_srun(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert cli.main(["launch", "job.py"]) == 2
    assert "by `srun rlmesh launch …`" in capsys.readouterr().err
    assert cli.main(["launch", "--standalone", "job.py"]) == 0
    monkeypatch.delenv("SLURM_PROCID")  # as in the shell of salloc
    capsys.readouterr()
    assert cli.main(["launch", "job.py"]) == 2
    assert "this is a shell of Slurm job 7, which has 2 nodes" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert cli.main(["launch", "job.py"]) == 0


def test_a_start_after_a_requeue_finds_its_run_directory() -> None:
    def options(**task: object) -> LaunchOptions:
        values = {"job": "17", "step": "0", "rank": 0, "size": 2, "node": 0, "node_name": "n1", **task}
        return StepPlace(Task(**values), Path(".rlmesh"), None).options(LaunchOptions(), "a/train.py")  # type: ignore[arg-type]

    assert options().run_dir == Path("runs/train-17")
    assert (options(restarts=2).run_dir, options(restarts=2).restarts) == (Path("runs/train-17"), 2)
    assert options(step="3").run_dir == Path("runs/train-17.3")
    assert options(array="15_2").run_dir == Path("runs/train-15_2")


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "slurm-7.out"),
        ({"array": "0-3"}, "slurm-7_*.out"),
        ({"output": "%x-%j.log", "chdir": "/w"}, "/w/train-7.log"),
        ({"output": "/o/%x/%4a", "job-name": "n"}, "/o/n/*"),
    ],
)
def test_the_output_that_is_named_is_the_one_that_sbatch_writes(options: dict[str, str], path: str) -> None:
    assert _output_of(options, "7", "a/train.py") == path
