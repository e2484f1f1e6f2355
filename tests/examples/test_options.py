"""Options of the examples: all faults at once, and before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from job_settings import Limits, SettingsParser
from ppo.main import args_2_omega_conf, parse_args, submit

from rlmesh.errors import UsageError
from tests.examples.conftest import EXAMPLES
from tests.own_time import HANG_S

pytestmark = pytest.mark.case("a21")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        parse_args(list(options))
    assert caught.value.code == 2
    head, *faults, end = capsys.readouterr().err.splitlines()
    assert "nothing was started" in head and end == "--help lists all options"
    return [fault.strip() for fault in faults]


def test_all_faults_are_told_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(
        capsys, "--steps", "-3", "--sede", "4", "--init_kl_coef", "-1e-5", "--actor_num_nodes", "x", "word",
        "--vllm_num_engines", "0",
    ) == [
        "--steps -3: it is at least 1",
        "--init_kl_coef -1e-5: it is at least 0",
        "--actor_num_nodes x: it is a whole number",
        "--vllm_num_engines 0: it is at least 1",
        "--sede: there is no such option. Did you mean --seed?",
        "word: there are options only, no words beside them",
    ]  # fmt: skip


@pytest.mark.parametrize(("options", "told"), [
    (("--step", "3"), "--step: there is no such option. Did you mean --steps?"),
    (("--steps",), "argument --steps: expected one argument"),
    (("--steps", "1.5"), "--steps 1.5: it is a whole number"),
    (("--init_kl_coef", "-inf"), "--init_kl_coef -inf: it is a finite number"),
    (("--device_per_node", "-1"), "--device_per_node -1: it is at least 1"),
])  # fmt: skip
def test_one_wrong_option_is_told_alone(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert refused(capsys, *options) == [told]


def test_right_options_are_taken() -> None:
    options = ["--steps", "8", "--pretrain", "m", "--set", "actor.lr=-1e-3", "--set", "algorithm.entropy=0.5"]
    config = args_2_omega_conf(parse_args(options))
    assert (config.steps, config.actor.lr, config.algorithm.entropy) == (8, -1e-3, 0.5)
    assert config.model == str(Path("m").absolute()) and config.actor.ranks == 2


def test_all_wrong_settings_are_told_in_one_message() -> None:
    settings = ("steps=x", "actor.lr=-1e-5", "actor.lrr=1", "train=zero4", "rollout.temperature=nan", "batch_size=1")
    with pytest.raises(UsageError) as caught:
        submit(parse_args([word for setting in settings for word in ("--set", setting)]))
    for fault in (
        "steps='x' must be a whole number", "actor.lr=-1e-05 must be ≥ 0", "did you mean actor.lr?",
        "train='zero4' must be one of", "rollout.temperature='nan' must be a number",
        "critic.minibatches=2 must be ≤ batch_size=1",
    ):  # fmt: skip
        assert fault in str(caught.value), fault


def test_a_parser_can_be_used_again(capsys: pytest.CaptureFixture[str]) -> None:
    parser = SettingsParser(prog="x")
    parser.add_setting(parser, "n", 1, Limits(least=1))
    with pytest.raises(SystemExit):
        parser.parse_args(["--n", "0"])
    assert parser.parse_args(["--n", "2"]).n == 2
    assert capsys.readouterr().err.startswith("x: an option is wrong, and nothing was started:\n  --n 0")


@pytest.mark.parametrize(("script", "options"), [
    ("ppo/main.py", ["--steps", "-3", "--seed", "-1"]),
    ("embedding/job.py", ["--steps", "-3"]),
])  # fmt: skip
def test_nothing_starts_with_wrong_options(tmp_path: Path, script: str, options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlmesh.cli.main", "launch", str(EXAMPLES / script), "--", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--steps -3" in done.stderr, done
    assert not list(tmp_path.iterdir())
