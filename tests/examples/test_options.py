"""Options of the examples: all faults at once, and before anything starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_settings import Limits, SettingsParser, setting, settings_of
from ppo.config import PPOConfig
from ppo.main import parse_args
from smollm.config import GRPOConfig

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
        capsys, "--steps", "-3", "--batch_size", "0", "--sede", "4", "--actor_lr", "-1e-5", "--temperature=nan",
        "--actor_engine", "zero4", "--micro_batch_size", "x", "word", "--gamma=2", "--rollout_num_engines", "0",
    ) == [
        "--steps -3: it is at least 1",
        "--batch_size 0: it is at least 1",
        "--actor_lr -1e-5: it is above 0",
        "--temperature nan: it is a finite number",
        "--actor_engine zero4: it is one of fsdp2, ddp, zero1, zero2, zero3. Did you mean zero3?",
        "--micro_batch_size x: it is a whole number",
        "--gamma 2: it is at most 1",
        "--rollout_num_engines 0: it is at least 1",
        "--sede: there is no such option. Did you mean --seed?",
        "word: there are options only, no words beside them",
    ]  # fmt: skip


@pytest.mark.parametrize(("options", "told"), [
    (("--step", "3"), "--step: there is no such option. Did you mean --steps?"),
    (("--steps",), "argument --steps: expected one argument"),
    (("--batch_size", "99999"), "--batch_size 99999: it is at most 32512"),
    (("--batch_size", "3"), "--batch_size 3: 2 ranks of the actor with 2 minibatches each need at least 4 prompts"),
    (("--steps", "1.5"), "--steps 1.5: it is a whole number"),
    (("--clip", "-inf"), "--clip -inf: it is a finite number"),
    (("--warmup_accuracy", "1.01"), "--warmup_accuracy 1.01: it is at most 1"),
    (("--device_per_node", "-1"), "--device_per_node -1: it is at least 1"),
])  # fmt: skip
def test_one_wrong_option_is_told_alone(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert refused(capsys, *options) == [told]


def test_right_options_are_taken() -> None:
    config = settings_of(
        parse_args(["--steps", "8", "--entropy_coef", "-1e-3", "--warmup_accuracy=0", "--activation_checkpointing"]),
        PPOConfig,
    )
    assert config == PPOConfig(steps=8, entropy_coef=-1e-3, warmup_accuracy=0.0, activation_checkpointing=True)


@pytest.mark.parametrize("kind", [PPOConfig, GRPOConfig])
def test_defaults_are_right_and_numbers_have_limits(kind: type[Any]) -> None:
    parser = SettingsParser(prog="x")
    parser.add_settings(parser, kind)
    assert settings_of(parser.parse_args([]), kind) == kind()
    free = {"entropy_coef"}
    for each in dataclasses.fields(kind):
        limits: Limits = each.metadata["limits"]
        assert limits.fault(each.default) == "", each.name
        if isinstance(each.default, int | float) and not isinstance(each.default, bool) and each.name not in free:
            assert limits.fault(-1) != "", f"{each.name} may be -1"


def test_a_parser_can_be_used_again(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        n: int = setting(1, "a number", least=1)

    parser = SettingsParser(prog="x")
    parser.add_settings(parser, Config)
    with pytest.raises(SystemExit):
        parser.parse_args(["--n", "0"])
    assert parser.parse_args(["--n", "2"]).n == 2
    assert capsys.readouterr().err.startswith("x: an option is wrong, and nothing was started:\n  --n 0")


@pytest.mark.parametrize(("script", "options"), [
    ("ppo/main.py", ["--steps", "-3", "--batch_size", "0"]),
    ("smollm/main.py", ["--steps", "-3", "--samples", "0"]),
    ("embedding/job.py", ["--steps", "-3"]),
])  # fmt: skip
def test_nothing_starts_with_wrong_options(tmp_path: Path, script: str, options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlmesh.cli.main", "launch", str(EXAMPLES / script), "--", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--steps -3" in done.stderr, done
    assert not list(tmp_path.iterdir())
