"""``rlmesh env check``: each planted fault is found with a clear line, and sound environments pass."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlmesh.cli.main import main
from rlmesh.envs import PPOConfig
from rlmesh.envs.checks import CheckDeadlines, CheckPlan, check_env
from rlmesh.envs.environments.registry import register_env, unregister_env
from rlmesh.errors import UsageError
from tests.envs.checks import broken

MODULE = "tests.envs.checks.broken"

FAULTS = {
    "SameArray": ("aliasing", r"step 1: this call changed the observation that was returned in episode 0.*copy\(\)"),
    "SameArrayInDict": ("aliasing", r"the observation\['deep'\]\['walk'\] that was returned in episode 0, step 0"),
    "SameArrayInTuple": ("aliasing", r"the observation\[1\] that was returned"),
    "SameArrayInInfo": ("aliasing", r"the info\['debug'\]\[0\]\['seen'\] that was"),
    "SameInfo": ("aliasing", r"the info\['t'\] that was"),
    "Outside": ("observation", r"episode 0, step 3, observation\[1\]: 200.0 is not from -100.0 to 100.0"),
    "OtherDtype": ("dtype", r"step 0, observation: the dtype is float64, but the space's is float32.*astype"),
    "ResetsItself": ("double-reset", r"episode 0, step 7: the step calls reset\(\) of ResetsItself.*Leave resets"),
    "BeginsAnew": ("double-reset", r"second start state of seed 0 was skipped.*took the place of the last"),
    "GlobalGenerator": ("determinism", r"step 1: two environments .* differ: .*reward .*np_random"),
    "OrderOfSets": ("determinism", r"two processes .* differ: .*order of sets"),
    "CarriesOver": ("determinism", r"used before gives another episode.*Let reset\(\) restore"),
    "repeats_actions": ("after-the-end", r"episode 0, step 2: Walk.step\(\) is called again.*must stop at the end"),
    "LivesOn": ("after-the-end", r"a step after the end of the episode is accepted"),
    "NoReward": ("reward", r"step 1: the reward is None \(NoneType\), not a finite number"),
    "NanReward": ("reward", r"step 5: the reward is nan \(float32\)"),
    "TextReward": ("reward", r"step 1: the reward is '1.0' \(str\)"),
    "GrowingSpace": ("changed-space", r"episode 0, step 0: action_space was Discrete\(3\) and is now Discrete\(4\)"),
    "OpensFiles": ("resources", r"opening and closing .*3 more descriptors are open: /dev/null. Close them in close"),
    "OpensFilesAtReset": ("resources", r"reset\(\), 6 times: 5 more descriptors are open: /dev/zero"),
    "Raises": ("exception", r"episode 0, step 5, action .*: IndexError: .*no such tile.* at .*broken.py:\d+"),
    "OldInterface": ("interface", r"step\(\) returned 4 values, not 5.*old gym"),
    "LosesLast": ("final-observation", r"episode 0, step 7, sub-environment 0: info has no 'final_obs'"),
    "FirstForLast": ("final-observation", r"is the first observation of the next episode.*SAME_STEP"),
    "SaysNextStep": ("final-observation", r"gives reward -.*declare SAME_STEP"),
    "SaysNothing": ("interface", r"no right .*autoreset_mode"),
    "EqualSeeds": ("seeding", r"all 3 sub-environments start with the same observation. Seed sub-environment i"),
    "shared_poles": ("aliasing", r"the observation that was returned in episode"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    check, text = FAULTS[name]
    report = check_env(f"{MODULE}:{name}", plan=CheckPlan(steps=60))
    assert not report.passed
    assert report.left_out == ()
    lines = report.lines()
    assert any(re.search(f"^FAULT .*{name}: {check}: .*{text}", line) for line in lines), lines
    # One fault makes few lines: its own, and what follows from it.
    assert {finding.check for finding in report.findings} <= {check, *FOLLOWS.get(name, ())}


FOLLOWS = {
    "ResetsItself": ("determinism",), "GrowingSpace": ("determinism",),
}  # fmt: skip
"""Other checks that the same fault touches."""


def test_a_step_that_hangs_is_found_with_its_line() -> None:
    report = check_env(f"{MODULE}:Hangs", deadlines=CheckDeadlines(step_s=0.5))
    (first, *_), lines = report.findings, report.lines()
    assert first.check == "deadline"
    assert first.where.startswith("episodes: episode 0, step 5, action")
    assert re.search(r"did not return within 0.5 s; it is at .*broken.py:\d+, in step", first.what)
    assert report.left_out == ("determinism", "resources")
    assert "LEFT OUT" in lines[-2]


def test_a_process_that_dies_is_reported() -> None:
    report = check_env(f"{MODULE}:Dies")
    assert report.findings[0].check == "exception"
    assert re.search(r"episode 0, step 5.* the process ended in this call \(signal SIGABRT\)", str(report.findings[0]))


SOUND: list[tuple[Any, dict[str, Any]]] = [
    ("CartPole-v1", {}),
    ("Pendulum-v1", {}),
    ("Blackjack-v1", {}),
    (f"{MODULE}:Walk", {}),
    (f"{MODULE}:nested", {}),
    (f"{MODULE}:configured", {"config": {"limit": 4}}),
    (f"{MODULE}:Walks", {}),
    ("CartPole-v1", {"num_envs": 3}),
    (f"{MODULE}:poles", {"config": {"mode": "NextStep"}}),
    (f"{MODULE}:poles", {"config": {"mode": "SameStep"}}),
    (f"{MODULE}:poles", {"config": {"mode": "Disabled"}}),
    (broken.Nested, {}),
]


@pytest.mark.parametrize(("env", "options"), SOUND, ids=[str(number) for number in range(len(SOUND))])
def test_a_sound_environment_passes(env: Any, options: dict[str, Any]) -> None:
    assert check_env(env, plan=CheckPlan(steps=60), **options).findings == ()


def test_the_command_prints_findings_and_sets_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", f"{MODULE}:NoReward", "--steps", "9"]) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith(f"FAULT    {MODULE}:NoReward: reward: episode 0, step 1: the reward is None")
    assert said[-1] == f"{MODULE}:NoReward: 1 fault found"
    assert main(["env", "check", f"{MODULE}:NoReward", "--steps", "9", "--skip", "reward"]) == 0
    assert capfd.readouterr().out == f"{MODULE}:NoReward: passed\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["CartPol-v1"], "Did you mean 'CartPole-v1'?"),
        (["tests.nothing:make"], "the module 'tests.nothing' cannot be imported"),
        ([f"{MODULE}:Wlk"], f"{MODULE} has no 'Wlk'"),
        ([f"{MODULE}:no_environment"], "the creator needs 2 arguments, one, two"),
        ([f"{MODULE}:NUMBER"], "a int is not a function or class"),
        (["CartPole-v1", "--config", "{"], "--config is not JSON"),
        (["CartPole-v1", "--config", "[1]"], "must be a JSON object"),
        (["CartPole-v1", "--skip", "aliases"], "no check 'aliases'"),
    ],
)
def test_wrong_use_is_told_the_right_one(words: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", *words]) == 2
    assert text in capfd.readouterr().err


def test_something_that_is_no_creator_is_refused() -> None:
    with pytest.raises(UsageError, match="a int is not a function or class"):
        check_env(3)  # type: ignore[arg-type]


def test_names_of_register_env_and_creators_with_a_context_are_checked() -> None:
    register_env("checked-walk", lambda context: broken.configured({"limit": context["limit"]}))
    try:
        assert check_env("checked-walk", config={"limit": 3}, plan=CheckPlan(steps=30)).findings == ()
        assert [found.check for found in check_env("checked-walk", plan=CheckPlan(steps=30)).findings] == ["exception"]
    finally:
        unregister_env("checked-walk")


def test_build_refuses_a_faulty_environment_if_it_is_to_be_checked() -> None:
    config = PPOConfig().environment(broken.NoReward, disable_env_checking=False)
    with pytest.raises(UsageError, match=r"NoReward: reward: episode 0, step 1: the reward is None"):
        config.build()


def test_the_planted_environments_differ_from_the_sound_one_by_their_fault() -> None:
    walk = broken.Walk()
    walk.reset(seed=3)
    assert [walk.step(1)[2] for _ in range(broken.LENGTH)] == [False] * 6 + [True]
