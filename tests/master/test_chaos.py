from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import UsageError
from rlmesh.master.chaos_plan import Kill, parse_kill, parse_kills
from tests.master.launched import TOY, Launched, launch

SIZES = {"ADDER": 2, "TRAINER": 1}
CLI = ("-m", "rlmesh.cli.main")


def rehearse(folder: Path, *kills: str, restart: str = "never", options: tuple[str, ...] = ()) -> Launched:
    chosen = [word for kill in kills for word in ("--chaos", kill)]
    command = [*CLI, "launch", "--view", "plain", "--restart", restart, *chosen, str(TOY), "--", *options]
    return Launched(command, folder)


@pytest.mark.parametrize("text", [
    "REWARD:0@step=5", "master@shutdown", "agent:1@now", "ACTOR:1@call=ACTOR.save", "A.b-c:3@after=2.5+TERM",
    "master@call=ACTOR.save", "ROLLOUT:0@start+STOP",
])  # fmt: skip
def test_a_kill_is_its_text(text: str) -> None:
    assert str(parse_kill(text)) == text
    assert parse_kill(text.replace("ACTOR.save", "save") if "ACTOR:" in text else text) == parse_kill(text)


@pytest.mark.parametrize(("text", "said"), [
    ("REWARD", "write TARGET@POINT"),
    ("REWARD@stop", "no point 'stop'"),
    ("REWARD@step", "step needs a value"),
    ("REWARD@start=3", "start needs no value"),
    ("REWARD@step=x", "'x' is not a number"),
    ("REWARD:x@now", "'x' is not a rank"),
    ("master@call=save", "say at whose call"),
    ("REWARD@now+NOSE", "no signal 'NOSE'"),
])  # fmt: skip
def test_what_is_no_kill_says_why(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_kill(text)


def test_roles_and_ranks_are_checked() -> None:
    with pytest.raises(UsageError, match=r"no role 'ADER'.*ADDER"):
        parse_kills(["ADER@now"], SIZES)
    with pytest.raises(UsageError, match="ADDER has 2 members"):
        parse_kills(["ADDER:2@now"], SIZES)
    assert parse_kill("agent@now").drawn(SIZES, random.Random(0)) == Kill("agent", 0, "now")


@given(st.integers(0, 2**31), st.integers(1, 20), st.floats(0.1, 100))
def test_the_same_seed_kills_the_same(seed: int, count: int, within_s: float) -> None:
    text = f"random:seed={seed},kills={count},within={within_s}"
    kills = parse_kills([text, "ADDER@now"], SIZES)
    assert kills == parse_kills([text, "ADDER@now"], SIZES)
    assert len(kills) == count + 1
    assert all(kill.rank is not None and kill.rank < SIZES[kill.target] for kill in kills)
    assert [parse_kill(str(kill)) for kill in kills] == kills
    assert all(0 <= kill.number <= within_s + 0.001 for kill in kills[:-1])


@pytest.mark.parametrize(("kill", "said"), [
    # The signal is on its way while the member goes on.
    pytest.param(
        "ADDER:1@start", "ADDER:1 .* was killed by SIGKILL while it (was set up|served calls)", marks=pytest.mark.slow
    ),
    ("TRAINER@step=1", "TRAINER:0 .* was killed by SIGKILL during run"),
    ("ADDER:0@call=add", "ADDER:0 .* was killed by SIGKILL while it served calls"),
    pytest.param("ADDER:0@shutdown", "ADDER:0 .* was killed by SIGKILL during teardown", marks=pytest.mark.slow),
])  # fmt: skip
def test_members_are_killed_at_their_moment(kill: str, said: str, tmp_path: Path) -> None:
    with rehearse(tmp_path, kill, options=("--sleep", "0.5")) as job:
        assert job.ended() == 1, job.output
        job.wait_for(said, 0.1)
    (run,) = (tmp_path / "runs").iterdir()
    done = [json.loads(line)["kill"] for line in (run / "chaos.jsonl").read_text().splitlines()]
    assert [str(parse_kill(text)) for text in done] == done and len(done) == 1
    lines = (run / "metrics.jsonl").read_text().splitlines() if "step" in kill else []
    assert all(json.loads(line)["step"] <= 1 for line in lines)


def test_a_wrong_kill_stops_nothing_but_the_launch(tmp_path: Path) -> None:
    with rehearse(tmp_path, "ADDR@now") as job:
        assert job.ended() != 0
        assert "the job has no role 'ADDR'" in job.output
    with rehearse(tmp_path, "ADDER@noww") as job:
        assert job.ended() == 2 and "no point 'noww'" in job.output


def test_a_running_job_is_rehearsed_from_outside(tmp_path: Path) -> None:
    with launch(tmp_path, "--sleep", "60") as job:
        job.wait_for("step 1")
        (run,) = (tmp_path / "runs").iterdir()  # others may run on this machine
        with Launched([*CLI, "chaos", str(run), "--kill", "ADDER:7"], tmp_path) as wrong:
            assert wrong.ended() == 2 and "chaos: ADDER:7@now: ADDER has 2 members" in wrong.output, wrong.output
        with Launched([*CLI, "chaos", str(run), "--kill", "ADDER:1"], tmp_path) as chaos:
            assert chaos.ended() == 0, chaos.output
            assert "happened: ADDER:1@now" in chaos.output
        assert job.ended() == 1
        assert "ADDER:1" in job.output and signal.Signals.SIGKILL.name in job.output
