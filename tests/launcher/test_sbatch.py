"""Scripts for sbatch: rendered like the golden files, and refused where they cannot work."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlmesh.errors import LaunchError, UsageError
from rlmesh_launcher.sbatch import BatchJob, submit
from rlmesh_launcher.sbatch_options import SBATCH_OPTIONS, split_words

GOLDEN = Path(__file__).parent / "golden"
LAUNCH = {
    "--restart": True,
    "--max-restarts": True,
    "--view": True,
    "--grace": True,
    "--run-dir": True,
    "--no-report": False,
    "--slurm": False,
}

LINES = {
    "one_task_per_node": "--nodes 2 --gpus-per-node=4 --time 1:00:00 examples/ppo/main.py",
    "one_task_per_gpu": "-N2 --ntasks-per-node=4 --gpus-per-task=1 -c 8 --exclusive examples/ppo/main.py",
    "requeue": "--requeue --no-kill -t 30 --signal=B:USR1@300 --run-dir runs/long --grace 60 job.py -- --lr 1e-3",
    "odd_names": "--job-name=a|b --comment 'it is \"odd\" $HOME \\ ' --nice --mail-user=a@b.c 'my job.py' 'x y' '$z'",
}


def batch_of(line: str) -> BatchJob:
    words = split_words(shlex.split(line), LAUNCH)
    return BatchJob(words.sbatch, words.job, words.launch)


@pytest.mark.parametrize("name", LINES)
def test_scripts_are_the_golden_files(name: str) -> None:
    assert batch_of(LINES[name]).script() == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize(
    ("line", "goes_on"),
    [
        ("--nodes=2 job.py", True),
        ("--ntasks=4 job.py", True),
        ("--nodes=1 job.py", False),
        ("--nodes=1 --no-kill job.py", True),
        ("-k -N1 job.py", True),
        ("--nodes=2 --no-kill=off job.py", False),
        ("--nodes=2 --restart never job.py", False),
        ("--nodes=2 --restart=never job.py", False),
        ("--nodes=2 --restart job job.py never", True),
        ("--nodes=2 --max-restarts=0 job.py", False),
        ("--nodes=2 --max-restarts 3 job.py", True),
    ],
)
def test_jobs_that_can_do_without_a_node_outlive_it(line: str, goes_on: bool) -> None:
    script = batch_of(line).script()
    assert ("\n#SBATCH --no-kill\n" in script) == goes_on
    assert ("srun --kill-on-bad-exit=0 --wait=0 --no-kill " in script) == goes_on


@pytest.mark.parametrize("name", LINES)
def test_scripts_are_shell(name: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / f"{name}.sh")], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", LINES)
def test_scripts_are_clean_shell(name: str) -> None:
    subprocess.run(["shellcheck", str(GOLDEN / f"{name}.sh")], check=True)


def test_words_are_told_apart() -> None:
    words = split_words(
        [
            "-N",
            "2",
            "-J=x",
            "--nice=5",
            "--exclusive",
            "--view",
            "plain",
            "--grace=3",
            "--no-report",
            "job.py",
            "--lr=1",
        ],
        LAUNCH,
    )
    assert words.sbatch == {"nodes": "2", "job-name": "x", "nice": "5", "exclusive": None}
    assert words.launch == ("--view", "plain", "--grace=3", "--no-report")
    assert words.job == ("job.py", "--lr=1")
    assert split_words(["--hold", "--", "job.py", "--", "a"], LAUNCH).job == ("job.py", "a")
    assert split_words([], LAUNCH).job == ()


def test_options_are_passed_through_unchanged() -> None:
    words = split_words(["--sbatch=--consolidate=a b", "--sbatch", "--new", "-N2", "job.py"], LAUNCH)
    assert words.sbatch == {"consolidate": "a b", "new": None, "nodes": "2"}
    assert words.launch == () and words.job == ("job.py",)
    script = BatchJob(words.sbatch, words.job).script()
    assert '#SBATCH --consolidate="a b"\n' in script and "#SBATCH --new\n" in script


def test_an_unknown_option_is_told_all_valid_ones() -> None:
    with pytest.raises(UsageError) as caught:
        split_words(["--partitoin=debug", "job.py"], LAUNCH)
    text = str(caught.value)
    assert "unknown option --partitoin. Did you mean --partition?" in text
    for name in (*(f"--{name}" for name in SBATCH_OPTIONS), *LAUNCH, "-N", "-p"):
        assert name in text.split() or f"{name}\n" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodes"], "--nodes needs a value"),
        (["--view", "--", "job.py"], "--view needs a value"),
        (["--requeue=yes", "job.py"], "--requeue takes no value"),
        (["-z", "job.py"], "unknown option -z"),
        (["--wrap=x", "job.py"], "unknown option --wrap"),
        (["--sbatch=x", "job.py"], "--sbatch x: give a long option"),
    ],
)
def test_wrong_options_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        split_words(words, LAUNCH)


def test_a_script_is_needed_and_values_stand_on_one_line() -> None:
    with pytest.raises(UsageError, match="no script to run"):
        BatchJob({}, ())
    with pytest.raises(UsageError, match="--comment: a value of sbatch stands on one line"):
        BatchJob({"comment": "a\n#SBATCH --uid=0"}, ("job.py",))


def test_the_key_is_on_no_command_line() -> None:
    script = batch_of(LINES["one_task_per_node"]).script()
    (command,) = [line for line in script.splitlines() if line.startswith("srun")]
    assert "KEY" not in command
    assert "export RLMESH_KEY" in script


def test_the_job_is_handed_to_sbatch_without_the_allocation_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    seen: dict[str, Any] = {}

    def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.update(options, argv=argv)
        return subprocess.CompletedProcess(argv, 0, "42;cluster\n", "")

    assert submit("#!/bin/bash\n", run) == "42"
    assert seen["argv"] == ["sbatch", "--parsable"]
    assert seen["input"] == "#!/bin/bash\n"
    assert [name for name in seen["env"] if name.startswith("SLURM")] == ["SLURM_CONF"]
    monkeypatch.delenv("SLURM_JOB_ID")
    submit("#!/bin/bash\n", run)
    assert "SLURM_NTASKS" in seen["env"], "outside of an allocation it is the user's"


def test_what_sbatch_says_is_told() -> None:
    def refuses(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 1, "", "sbatch: error: invalid partition specified: gpu\n")

    def missing(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError(argv[0])

    def silent(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(argv, 60)

    with pytest.raises(LaunchError, match="invalid partition specified: gpu"):
        submit("", refuses)
    with pytest.raises(LaunchError, match="no sbatch on PATH"):
        submit("", missing)
    with pytest.raises(LaunchError, match="no answer within 60 s"):
        submit("", silent)
