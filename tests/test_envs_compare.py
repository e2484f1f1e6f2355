"""The program that compares rlmesh.envs with its peers: resuming, limits, the way to a goal, verdicts."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import envs_cleanrl  # noqa: E402
import envs_compare  # noqa: E402
import envs_rllib  # noqa: E402
from envs_measure import Way, rate  # noqa: E402
from envs_results import Results  # noqa: E402
from envs_rows import ROWS  # noqa: E402
from envs_table import middle, table, verdicts  # noqa: E402
from envs_tries import last_line, measured  # noqa: E402

sys.path.remove(str(BENCHMARKS))

LIMITS = dict.fromkeys(ROWS, 60.0)


def test_every_library_of_a_row_has_a_program_with_that_row() -> None:
    for name, row in ROWS.items():
        for library in ("rlmesh", *row.peers, *row.beside):
            text = (BENCHMARKS / f"envs_{library}.py").read_text()
            assert f'"{name}"' in text or name in ("dqn", "sac", "td3"), f"{library} lacks {name}"


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    """Interrupted after two measurements; a failure is measured again, a result is not."""
    file, asked = tmp_path / "found.json", []
    todo = envs_compare.pairs(["ppo_zoo", "dqn"], 2, {"rlmesh", "sb3"})
    assert todo[:4] == [(0, "ppo_zoo", "rlmesh"), (0, "ppo_zoo", "sb3"), (0, "dqn", "rlmesh"), (0, "dqn", "sb3")]

    def measure(name: str, library: str, seed: int, limit_s: float) -> dict[str, object]:
        asked.append((seed, name, library))
        if len(asked) == 3:
            raise KeyboardInterrupt
        if len(asked) == 1:
            return {"failed": "no such package"}
        return {"seconds": 1.0 + seed, "steps": 5, "reached": True}

    with pytest.raises(KeyboardInterrupt):
        envs_compare.go_on(Results(file), todo, LIMITS, None, measure)
    assert list(json.loads(file.read_text())["ppo_zoo"]) == ["rlmesh", "sb3"]
    envs_compare.go_on(Results(file), todo, LIMITS, None, measure)
    assert asked == [*todo[:3], todo[0], *todo[2:]]
    envs_compare.go_on(Results(file), todo, LIMITS, None, measure)
    assert len(asked) == 3 + len(todo) - 1
    found = Results(file).measured["ppo_zoo"]["rlmesh"]["1"]
    assert found["seconds"] == 2.0 and found["limit_s"] == 60 and found["took_s"] >= 0


def test_no_measurement_begins_after_the_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(None)
    envs_compare.go_on(results, [(0, "dqn", "rlmesh")], LIMITS, -1.0, lambda *_: {"steps": 1})
    assert results.measured == {} and "1 measurements were not looked at" in capsys.readouterr().err


def test_what_stopped_at_a_lower_limit_is_measured_again() -> None:
    results = Results(None)
    results.add("dqn", "sb3", 0, {"steps": 9, "reached": False, "stopped": "60 s", "limit_s": 60})
    assert results.has("dqn", "sb3", 0, 60) and not results.has("dqn", "sb3", 0, 61)
    results.add("dqn", "sb3", 0, {"steps": 9, "reached": False, "stopped": "500,000 steps", "limit_s": 60})
    assert results.has("dqn", "sb3", 0, 61)
    assert not results.has("dqn", "sb3", 1, 60) and not results.has("sac", "sb3", 0, 60)


@pytest.mark.parametrize("text", ["{", "[]", '{"dqn": 3}', '{"dqn": {"sb3": {"0": 3}}}', '{"dqn": {"sb3": [1]}}'])
def test_another_file_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no file of results of this program"):
        Results(file)
    assert file.read_text() == text


def program(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(text)
    return [sys.executable, str(file)]


def test_a_result_is_the_last_json_object_of_the_output(tmp_path: Path) -> None:
    command = program(tmp_path, "print('{\"steps\": 1, \"partial\": true}'); print('{\"steps\": 2}'); print('bye [3]')")
    assert measured(command, 30) == {"steps": 2}
    assert last_line("3\n[4]\nnull\n") is None


def test_a_program_that_fails_gives_its_reason(tmp_path: Path) -> None:
    found = measured(program(tmp_path, "print('{\"steps\": 1, \"partial\": true}'); raise ImportError('no peer')"), 30)
    assert found == {"failed": "exit status 1: ImportError: no peer"}
    found = measured(program(tmp_path, 'print(\'{"steps": 1, "partial": true}\')'), 30)
    assert found["failed"].startswith("exit status 0"), "it ended on the way"


def test_a_program_over_its_limit_ends_with_all_its_processes(tmp_path: Path) -> None:
    """The child has left the session, holds the output, and does not end by itself."""
    child = "import time; open('%s', 'w').write('up'); time.sleep(600)" % (tmp_path / "up")
    command = program(
        tmp_path,
        "import subprocess, sys, time, os\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"while not os.path.exists({str(tmp_path / 'up')!r}): time.sleep(0.01)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        'print(\'{"steps": 70, "mean": 12.5, "reached": false, "partial": true}\', flush=True)\n'
        "time.sleep(600)\n",
    )
    began = time.monotonic()
    found = measured(command, 0, grace_s=4)
    assert found == {"steps": 70, "mean": 12.5, "reached": False, "stopped": "0 s"}
    assert time.monotonic() - began < 60
    child_state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 30
    while child_state.exists() and child_state.read_text().rsplit(") ", 1)[1][0] != "Z":
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.01)


def test_a_silent_program_over_its_limit_has_failed(tmp_path: Path) -> None:
    found = measured(program(tmp_path, "import time; time.sleep(600)"), 0, grace_s=0.2)
    assert found == {"failed": "nothing within 0 s"}


def test_a_way_ends_at_its_goal_its_steps_or_its_time() -> None:
    way = Way(100, 1000, limit_s=math.inf)
    assert not way.ends(10, None) and not way.ends(20, math.nan) and not way.ends(30, 99.9)
    assert not way.ends(40, 100, enough=False)
    assert way.ends(50, 100) and way.result["reached"] and "stopped" not in way.result
    assert way.ends(1000, 99) and way.result["stopped"] == "1,000 steps" and not way.result["reached"]
    assert way.ends(1000, 100) and way.result["reached"], "the goal at the last step counts"
    assert Way(100, 1000, limit_s=0).ends(1, 3.0)


def test_a_way_is_told_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    way = Way(100, 1000, limit_s=math.inf)
    way.ends(10, 1.0)
    way._told -= 1
    way.ends(20, 2.0)
    way.ends(30, 3.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["steps"] == 20 and json.loads(line)["partial"]


def test_a_rate_leaves_out_the_first_call() -> None:
    calls: list[int] = []

    def collect() -> int:
        calls.append(1)
        return 10

    assert rate(collect, steps=30)["steps_per_s"] > 0 and len(calls) == 4
    calls.clear()
    rate(collect, steps=10**9, seconds=0.0)
    assert len(calls) == 2, "one counts even if there is no time"


def test_the_episodes_of_cleanrl_are_read_from_what_it_prints() -> None:
    seen: list[tuple[int, float]] = []
    watch = envs_cleanrl.Watch(lambda steps, episode: seen.append((steps, episode)))
    for text in (
        "global_step=104, episodic",
        "_return=26.0",
        "\n",
        "SPS: 2093\nglobal_step=120, episodic_return=9.0\n",
    ):
        watch.write(text)
    assert seen == [(104, 26.0), (120, 9.0)]


def test_rllibs_returns_are_those_of_whole_episodes_and_of_as_many_as_asked_for() -> None:
    """Its samples have pieces of episodes, and its own mean is over fewer episodes."""
    runner, logged = SimpleNamespace(), list[float]()

    def piece(name: str, value: float, done: bool) -> Any:
        return SimpleNamespace(id_=name, get_return=lambda: value, is_done=done)

    def sample(*pieces: Any) -> dict[str, Any]:
        logged.clear()
        logger = SimpleNamespace(log_value=lambda key, value, **more: logged.append(value))
        envs_rllib.sampled(env_runner=runner, metrics_logger=logger, samples=list(pieces))
        return {"num_env_steps_sampled_lifetime": 10, "env_runners": {"returns": list(logged)}}

    results = [
        sample(piece("a", 4.0, True), piece("b", 3.0, False)), sample(piece("b", 6.0, False)),
        sample(piece("b", 1.0, True), piece("c", 12.0, True)), {"num_env_steps_sampled_lifetime": 40},
    ]  # fmt: skip
    assert [each.get("env_runners", {}).get("returns") for each in results] == [[4.0], [], [10.0, 12.0], None]
    assert runner.returns_so_far == {}
    remaining = iter(results)
    algorithm = SimpleNamespace(train=lambda: next(remaining))
    found = envs_rllib.train(algorithm, Way(11.0, 40, limit_s=math.inf), 2)
    assert found["mean"] == 11.0 and found["reached"]
    assert len(list(remaining)) == 1, "it ends at once"


def of(*values: float, key: str = "seconds", **more: Any) -> dict[str, dict[str, Any]]:
    return {str(seed): {key: value, **more} for seed, value in enumerate(values)}


def test_a_training_that_did_not_get_there_counts_as_the_longest() -> None:
    found = [*of(1.0, 2.0).values(), {"seconds": 0.5, "reached": False, "stopped": "60 s"}]
    assert middle(ROWS["ppo_zoo"], found) == 2.0
    assert middle(ROWS["ppo_zoo"], found[1:] + found[2:]) == math.inf


def test_the_verdicts() -> None:
    rates = {"rlmesh": 30.0, "sb3": 20.0, "rllib": 9.0, "cleanrl": 4.0, "torchrl": 2.0, "envpool": 90.0}
    sampled = {name: of(value, key="steps_per_s") for name, value in rates.items()}
    assert verdicts("sampling_16", {"sampling_16": sampled}) == [
        ">= 3 x rllib: 3.33, met", ">= 1.3 x the best, sb3: 1.50, met",
    ]  # fmt: skip
    del sampled["sb3"], sampled["cleanrl"]
    assert "the best, rllib (without cleanrl, sb3): 3.33, met" in verdicts("sampling_16", {"sampling_16": sampled})[1]
    own = {
        "ppo_own": {"rlmesh": of(5.0)}, "ppo_rllib": {"rllib": of(100.0)}, "ppo_cleanrl": {"cleanrl": of(7.0)},
        "ppo_zoo": {"sb3": of(9.0), "torchrl": of(3.0, reached=False, stopped="60 s")},
    }  # fmt: skip
    assert verdicts("ppo_own", own) == ["<= 0.667 x the best, cleanrl: 0.71, MISSED"]
    equal = {"ppo_cleanrl": {"rlmesh": of(7.0), "cleanrl": of(7.0)}}
    assert verdicts("ppo_cleanrl", equal) == ["< 1 x cleanrl: 1.00, MISSED"]
    lost = {"ppo_cleanrl": {"rlmesh": of(7.0), "cleanrl": of(6.0, reached=False, stopped="60 s")}}
    assert verdicts("ppo_cleanrl", lost) == ["< 1 x cleanrl: met, it did not get there"]
    lost["ppo_cleanrl"]["rlmesh"] = of(6.0, reached=False, stopped="60 s")
    assert "met" not in verdicts("ppo_cleanrl", lost)[0]
    assert verdicts("first_1", {"first_1": {"rlmesh": of(1.5)}}) == ["<= 2 s: 1.50, met"]
    noise = {"kills": {"rlmesh": of(-3.0, -1.0, 4.0, key="difference")}}
    assert verdicts("kills", noise) == ["0 in [-9.0, 9.0], 95 % of the mean: met"]  # 4.303 * 3.606 / sqrt(3)
    noise["kills"]["rlmesh"] = of(-3.0, -2.0, -4.0, key="difference")
    assert verdicts("kills", noise) == ["0 in [-5.5, -0.5], 95 % of the mean: MISSED"]
    assert "needs three seeds" in verdicts("kills", {"kills": {"rlmesh": of(1.0, key="difference")}})[0]
    assert verdicts("appo", {}) == [">= 1.2 x: not measured"]


def test_the_table_says_what_failed_and_what_stopped() -> None:
    text = table({
        "replay": {"rlmesh": of(900.0, key="rounds_per_s", load=0.5), "torchrl": {"0": {"failed": "no extension"}}},
        "impala": {"rllib": of(300_000, key="steps", reached=False, stopped="60 s", mean=80.5)},
    })  # fmt: skip
    assert "failed no extension" in text and ">= 1 x torchrl: not measured" in text
    assert ">300,000 steps" in text and "1 of 1 did not get there: 60 s; mean return 80.5" in text
    assert "load when a measurement began: median 0.5, most 0.5" in text
