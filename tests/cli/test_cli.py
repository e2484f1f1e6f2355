"""The command line: its help is pinned, its exit codes are a promise, its errors are for people."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_args

import pytest

from rlmesh.cli.commands.launch import VIEWS
from rlmesh.cli.main import build_parser, main
from rlmesh.driver.options import effective
from rlmesh.observe.views.live import ViewMode

HELP = """\
usage: rlmesh [-h] COMMAND ...

Runs multi-role reinforcement-learning jobs without Ray.

options:
  -h, --help  show this help message and exit

commands:
  COMMAND
    launch    run a script that submits a job
    ps        list the jobs that run on this machine
    status    print the state of a job, or how it ended
    logs      print the output of members
    stacks    print what each thread of each member is doing
    stop      end a job and prove that nothing is left
    doctor    check this machine, or name the bottleneck of a run
    plan      print where a job's members would run
    timeline  write a job as a trace for Perfetto
    chaos     rehearse the failure of a running job
    prepare   create the parquet files of a well-known data set
    train     train a language model, or an agent in an environment
    evaluate  evaluate a model, a checkpoint or an agent
    samples   show prompts, responses and rewards
    replay    compute a recorded step again
    export    write a policy as a folder of transformers
    env       check an environment, record and replay its episodes
    keygen    create a job's key
    version   print the versions of rlmesh and Python

Exit codes: 0 the job succeeded, 1 it failed, 2 wrong usage, 75 it stopped
after notice and can be resumed, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

LAUNCH_HELP = """\
usage: rlmesh launch [options] JOB.py [script arguments]

Run a script that submits a job. Words after the script are its arguments.
With --nnodes, run the command on each node: the script runs on node 0, the
other nodes take part with an agent each.

positional arguments:
  JOB.py                the script; it calls submit() on a job

options:
  -h, --help            show this help message and exit
  --view {auto,live,plain,none}
                        how progress is shown: live on a terminal, plain lines
                        elsewhere (auto, the default), or not at all
  --run-dir DIR         folder of logs, metrics and report
  --restart {member,role,job,never}
                        what to restart when a member dies, whatever the job
                        says (never: the job fails)
  --key-file FILE       the job's key, made by rlmesh keygen (default: the
                        file that RLMESH_KEY_FILE names, else a new key)
  --chaos KILL          rehearse a failure, such as REWARD:0@step=5,
                        ACTOR@call=save, master@shutdown or
                        random:seed=1,kills=3,within=30; can be repeated (see
                        rlmesh chaos --help)
  --metrics ADDRESS     serve metrics to Prometheus at 127.0.0.1:PORT (0: any;
                        it is in metrics.address) or unix:PATH
  --tracker NAME        show metrics in wandb, mlflow, trackio, each also with
                        a project (wandb:PROJECT), or module:Class; can be
                        repeated
  --timeline            trace single calls, for rlmesh timeline
  --dry-run             print how nodes would be started; start nothing
  --grace S             seconds between SIGTERM and SIGKILL when the job is
                        stopped (default 2.5)
  --stop-within S       seconds that all ranks have, after notice, to reach
                        the step at which they stop together (default 600)

several nodes, as torchrun:
  --nnodes N[:MAX]      number of nodes, the same on each (default 1)
  --node-rank R         0 runs the script, the other nodes run an agent each
  --rdzv-endpoint HOST[:PORT]
                        address of node 0 (default port 29400)
  --master-addr HOST    the same, in two options
  --local-addr ADDRESS  address of this node for the others, if the detected
                        one is wrong
  --rdzv-conf K=V,…     join_timeout=600,last_call_timeout=30 (seconds)
  --standalone          use this machine alone, whatever PET_* says
  --nproc-per-node N    device slots of each node for a job on CPUs
  --log-dir DIR         folder for run directories (default runs)
  -m, --module          JOB.py is the name of a module
  --max-restarts N      restarts of members in all, for roles for which the
                        job sets no number

several nodes, over ssh:
  --hosts FILE          hosts.toml: the machines, the first runs the script

Slurm:
  --slurm               submit the job to sbatch: rlmesh launch --slurm [any
                        option of sbatch] JOB.py … (--dry-run prints the
                        script). Inside a job, `srun rlmesh launch JOB.py`
                        needs no option
  --sbatch OPTION       pass an option to sbatch unchanged, such as one that
                        rlmesh does not know: --sbatch=--name=value
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "job.py"


def test_help_is_pinned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert build_parser().format_help() == HELP
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == LAUNCH_HELP


def test_all_views_can_be_chosen() -> None:
    assert get_args(ViewMode) == VIEWS


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("rlmesh 0.")


@pytest.mark.parametrize("argv", [
    [], ["fly"], ["launch", "--view", "3d", "x.py"], ["launch", "--nnodes"], ["launch", "--grace", "-1", "x.py"],
    ["launch", "--stop-within", "soon", "x.py"], ["stop", "--grace=nan"], ["logs", "-n", "-5"],
    ["chaos", "--random", "-1"], ["chaos", "--kill", "A", "--at-step=x"],
])  # fmt: skip
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: rlmesh" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "nowhere.py"]) == 2
    assert "there is no script nowhere.py" in capsys.readouterr().err


def test_a_dry_run_of_nothing_to_print_starts_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("print('ran')\n")
    assert main(["launch", "--dry-run", str(script)]) == 2
    said = capsys.readouterr()
    assert "it goes with --hosts or --slurm; `rlmesh plan JOB.py`" in said.err and not said.out


def test_words_that_mean_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--", "job", "x"]) == 2
    assert "'job x' behind -- means nothing here; rlmesh status --help" in capsys.readouterr().err


def test_launch_without_a_script_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 2
    assert "name the script" in capsys.readouterr().err


def test_what_stands_after_the_script_is_for_it(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    assert main(["launch", "--view", "none", str(script), "--view", "3d", "--node_rank", "x", "--", "y"]) == 0
    assert capsys.readouterr().out == "['--view', '3d', '--node_rank', 'x', '--', 'y']\n"


@pytest.mark.case("b18")
@pytest.mark.parametrize("words", [
    ["--a", "x y", "--", "--b", "1"], ["--", "--"], ["--", "--", "x"], ["--n", "7"], ["--log", "3"], ["--run"],
    ["--max", "1"], ["--s"], ["-m"], ["--slurm"], ["--help"], ["-h"], ["--json", "--cluster", "x"], ["a", "--dry-run"],
    ["--view=live"], ["--key-stdin"], [], ["", "-"],
])  # fmt: skip
@pytest.mark.parametrize(
    "command",
    [
        ["launch"],
        ["launch", "--view", "none"],
        [
            "launch",
            "--",
        ],
        ["plan", "--json"],
    ],
)
def test_no_word_of_the_script_is_taken(
    command: list[str], words: list[str], script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    main([*command, str(script), *words])
    assert json.loads(capsys.readouterr().out) == words[words[:1] == ["--"] :]


@pytest.mark.case("b18")
@pytest.mark.parametrize(("words", "said"), [
    (["--ru", "x", "job.py"], "unknown option --ru. Did you mean '--run-dir'?"),
    (["--cluster", "x", "job.py"], "unknown option --cluster."),
    (["-x", "job.py"], "unknown option -x."),
])  # fmt: skip
def test_an_unknown_option_before_the_script_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", *words])
    assert said in capsys.readouterr().err


def test_module_runs_as_main(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script.with_name("jobs_of_mine.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.chdir(script.parent)
    assert main(["launch", "-m", "jobs_of_mine", "1"]) == 0
    assert capsys.readouterr().out == "__main__ ['1']\n"


def test_a_key_in_the_environment_does_not_stay_there(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLMESH_KEY", "ab" * 32)
    script.write_text(
        "import os\nfrom rlmesh.driver.options import effective\n"
        "print(effective(None).key.hex(), 'RLMESH_KEY' in os.environ)\n"
    )
    assert main(["launch", str(script)]) == 0
    assert capsys.readouterr().out == f"{'ab' * 32} False\n"


def test_script_runs_as_main_with_its_arguments_and_folder(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script.parent / "beside.py").write_text("here = 'beside'\n")
    script.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.here)\n")
    argv, path = list(sys.argv), list(sys.path)
    try:
        assert main(["launch", str(script), "--", "--steps", "3", "--", "x"]) == 0
    finally:
        sys.modules.pop("beside", None)
    assert capsys.readouterr().out == "__main__ ['--steps', '3', '--', 'x'] beside\n"
    assert (sys.argv, sys.path) == (argv, path)


def test_options_reach_the_jobs_of_the_script_only(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("from rlmesh.driver.options import effective\nprint(effective(None))\n")
    assert main(["launch", "--view", "plain", "--run-dir", "/r", str(script)]) == 0
    out = capsys.readouterr().out
    assert "view='plain'" in out
    assert "run_dir=PosixPath('/r')" in out
    assert effective(None).view is None


@pytest.mark.parametrize(("body", "code", "said"), [
    ("raise SystemExit(7)", 7, ""),
    ("raise SystemExit", 0, ""),
    ("raise SystemExit('no such model')", 1, "no such model\n"),
    ("raise KeyboardInterrupt('job toy was stopped: Ctrl-C')", 130, "rlmesh: job toy was stopped: Ctrl-C\n"),
    ("from rlmesh.errors import PlacementError\nraise PlacementError('9 wanted')", 1,
     "rlmesh: PlacementError (RM400): 9 wanted\n"),
])  # fmt: skip
def test_launch_ends_with_the_exit_code_of_the_script(
    script: Path, body: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(body)
    assert main(["launch", str(script)]) == code
    assert capsys.readouterr().err == said


def test_error_of_the_script_shows_its_own_frames_only(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("def f():\n    raise ValueError('mine')\nf()\n")
    assert main(["launch", str(script)]) == 1
    told = capsys.readouterr().err
    assert "ValueError: mine" in told
    assert "runpy" not in told
    assert "launch.py" not in told


def test_failed_job_is_told_without_a_traceback(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(
        "from rlmesh.errors import JobFailed, PeerLost, RemoteError\n"
        "first = PeerLost('A:1 was killed by SIGKILL\\nlast lines of log:\\n    bye')\n"
        "error = JobFailed('job toy failed: x', [first, RemoteError('TRAINER:0 failed in run(): PeerLost\\nmore')])\n"
        "error.run_dir = '/runs/toy'\n"
        "raise error\n"
    )
    assert main(["launch", str(script)]) == 1
    assert capsys.readouterr().err == (
        "\njob toy failed. First cause:\n"
        "  A:1 was killed by SIGKILL\n"
        "  last lines of log:\n"
        "      bye\n"
        "What followed:\n"
        "  TRAINER:0 failed in run(): PeerLost\n"
        "Logs and metrics: /runs/toy\n"
    )


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "1e400", "1e30"])
@pytest.mark.parametrize("words", [("launch", "--grace"), ("launch", "--stop-within"), ("stop", "--grace")])
def test_times_that_no_clock_counts_are_refused(
    words: tuple[str, str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([words[0], f"{words[1]}={text}", "job.py"])
    assert ended.value.code == 2
    assert "is not a number of seconds" in capsys.readouterr().err


def test_a_script_that_cannot_be_read_is_told_without_our_own_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text("def run(:\n")
    assert main(["launch", str(script)]) == 1
    err = capsys.readouterr().err
    assert f'File "{script}", line 1' in err and "SyntaxError" in err
    assert "rlmesh/cli" not in err


def test_a_script_that_submits_no_job_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.py"
    script.write_text("print('described, and forgotten')\n")
    assert main(["launch", str(script)]) == 0
    assert capsys.readouterr().err == f"rlmesh launch: {script} has ended and submitted no job\n"


def test_a_script_that_is_interrupted_is_told_to_have_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text("raise KeyboardInterrupt\n")
    assert main(["launch", str(script)]) == 130
    assert capsys.readouterr().err == "rlmesh: stopped\n"
