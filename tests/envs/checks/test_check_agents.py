"""``rlmesh env check`` of several agents: each planted fault is found in each form, and sound environments pass."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlmesh.cli.main import main
from rlmesh.envs import make_multi_agent
from rlmesh.envs.checks import CheckDeadlines, CheckPlan, EpisodeRecording, check_env
from rlmesh.envs.checks.findings import EnvFinding
from rlmesh.envs.checks.subject import GROUPS, _run
from rlmesh.errors import UsageError

from . import broken_agents

MODULE = "tests.envs.checks.broken_agents"
ALL = ("own", "turns", "parallel", "AEC")
OWN = ("own", "turns")
TOGETHER = ("own", "parallel")

FAULTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "SameArray": (
        "aliasing",
        r"step \d: .*this call changed the observation\['a'\] that was returned.*copy\(\)",
        ALL,
    ),
    "SameArrayInDict": ("aliasing", r"the observation\['a'\]\['deep'\] that was returned in episode 0", ALL),
    "SameArrayInInfo": ("aliasing", r"the info\['.'\]\['debug'\]\[0\]\['seen'\] that was", ALL),
    "ChangesActions": ("aliasing", r"the step changes its argument: action\['.'\]", ALL),
    "Outside": ("observation", r"step \d, observation\['b'\]\[1\]: 200.0 is not from -100.0 to 100.0", ALL),
    "OtherDtype": ("dtype", r"observation\['b'\]: the dtype is float64, but the space's is float32.*astype", ALL),
    "ResetsItself": ("double-reset", r"the step calls reset\(\) of (Own|OwnTurns|Parallel|InTurns)\. Leave", ALL),
    "BeginsAnew": ("double-reset", r"second start state of seed 0 was skipped", ALL),
    "GlobalGenerator": ("determinism", r"two environments .* differ: .*reward .*np_random", ALL),
    "CarriesOver": ("determinism", r"used before gives another episode.*Let reset\(\) restore", ALL),
    "LivesOn": ("after-the-end", r"a step after the end of the episode is accepted", OWN),
    "NoReward": ("reward", r"agent 'b': the reward is None \(NoneType\), not a finite number", (*OWN, "parallel")),
    "TextReward": ("reward", r"agent 'a': the reward is '1.0' \(str\)", (*OWN, "parallel")),
    "NanReward": ("reward", r"step \d+, agent 'a': the reward is nan", ALL),
    "GrowingSpace": ("changed-space", r"action_space of agent 'b' was Discrete\(4\) and is now Discrete\(5\)", ALL),
    "NoSpace": ("interface", r"action_space of agent 'b': it is 3, not a space of Gymnasium", ALL),
    "NoLast": ("final-observation", r"agent 'a' was truncated without an observation.*Return its last", TOGETHER),
    "Raises": ("exception", r"episode 0, step \d, action .*: IndexError: .*no such tile.* at .*broken_agents.py", ALL),
}
FOLLOWS = {
    "ResetsItself": ("determinism",), "GrowingSpace": ("determinism",), "NoSpace": ("exception",),
}  # fmt: skip
"""Other checks that the same fault touches."""


def findings_of(make: Any, steps: int = 60) -> list[EnvFinding]:
    """The findings of all groups of checks, in this process; those of `check_env`, but for a second process."""
    found: list[EnvFinding] = []

    def tell(**message: Any) -> None:
        if "finding" in message:
            found.append(EnvFinding(**message["finding"]))

    _run(make, {"plan": vars(CheckPlan(steps=steps)), "groups": GROUPS}, tell)
    return found


def form(name: str) -> Any:
    if name not in broken_agents.FORMS:
        pytest.skip("PettingZoo is not installed (extra: pettingzoo)")
    return broken_agents.FORMS[name]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (*_, kinds) in FAULTS.items() for kind in kinds])
def test_a_planted_fault_is_found(name: str, kind: str) -> None:
    check, text, _ = FAULTS[name]
    found = findings_of(partial(form(kind), getattr(broken_agents, name)))
    assert any(re.search(f"^{check}: .*{text}", str(each)) for each in found), list(map(str, found))
    # One fault makes few lines: its own, and what follows from it.
    assert {each.check for each in found} <= {check, *FOLLOWS.get(name, ())}, list(map(str, found))


@pytest.mark.parametrize(
    ("name", "check", "text"),
    [
        ("OldInterface", "interface", r"step\(\) returned 4 values, not 5"),
        ("NoAll", "interface", r"terminateds has no key '__all__'"),
        ("NoDict", "interface", r"rewards are .*, not a dict by agent"),
        ("Returns", "after-the-end", r"step 5: agent 'b' was done in an earlier step, and has an observation again"),
        ("NumberAsFlag", "interface", r"'b': terminated is 0 \(int\), not a bool"),
    ],
)
def test_a_broken_rule_of_dicts_is_found(name: str, check: str, text: str) -> None:
    found = findings_of(lambda: getattr(broken_agents, name)(broken_agents.Match))
    assert any(re.search(text, str(each)) for each in found), list(map(str, found))
    assert {each.check for each in found} == {check}


@pytest.mark.parametrize("rules", ["Match", "Masked"])
@pytest.mark.parametrize("kind", ALL)
def test_sound_environments_pass(kind: str, rules: str) -> None:
    assert findings_of(partial(form(kind), getattr(broken_agents, rules)), steps=100) == []


def test_copies_of_an_environment_pass() -> None:
    copies = make_multi_agent("CartPole-v1")
    assert findings_of(lambda: copies({"num_agents": 3}), steps=100) == []


def test_agents_that_come_and_go_pass() -> None:
    from ..multi_agent.environments import Shift, Turns

    for kind in (Shift, Turns):
        assert findings_of(kind, steps=100) == []


@pytest.mark.parametrize(
    ("name", "check", "text"),
    [
        ("OrderOfSets", "determinism", r"two processes .* differ: .*order of sets"),
        ("OpensFiles", "resources", r"opening and closing .*3 more descriptors are open: /dev/null. Close them in"),
        ("OpensFilesAtReset", "resources", r"reset\(\), 6 times: 5 more descriptors are open: /dev/zero"),
    ],
)
def test_faults_that_need_a_process_are_found(name: str, check: str, text: str) -> None:
    report = check_env(f"{MODULE}:turns_{name}", plan=CheckPlan(steps=30))
    assert re.search(text, "\n".join(report.lines()))
    assert {finding.check for finding in report.findings} == {check}


def test_a_step_that_hangs_is_found_with_its_line() -> None:
    report = check_env(f"{MODULE}:own_Hangs", deadlines=CheckDeadlines(step_s=0.5))
    first = report.findings[0]
    assert first.check == "deadline"
    assert first.where.startswith("episodes: episode 0, step 5, action")
    assert re.search(r"did not return within 0.5 s; it is at .*broken_agents.py:\d+, in act", first.what)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("rules", ["Match", "ChangesActions"])
def test_an_episode_is_repeated_bit_for_bit(kind: str, rules: str, tmp_path: Path) -> None:
    make = partial(form(kind), getattr(broken_agents, rules))
    recording = EpisodeRecording.record(make, name="x", seed=5)
    assert len(recording.actions) == (7 if kind in TOGETHER else 14)
    assert recording.ended == "terminated"
    recording.save(tmp_path / "episode.json")
    loaded = EpisodeRecording.load(tmp_path / "episode.json")
    assert loaded == recording
    assert loaded.replay(make) is None
    if rules == "Match":
        different = loaded.replay(partial(form(kind), broken_agents.NanReward))
        assert re.search(r"^step \d+ was observation", str(different))


def test_the_command_line_takes_several_agents(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "episode.json")
    assert main(["env", "check", f"{MODULE}:turns_NoReward", "--steps", "9"]) == 1
    assert "the reward is None" in capfd.readouterr().out
    assert main(["env", "record", f"{MODULE}:own_Match", "--to", file, "--seed", "4"]) == 0
    assert main(["env", "replay", f"{MODULE}:own_Match", "--from", file]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"{file}: 7 steps from seed 4, terminated", f"{MODULE}:own_Match: all 7 steps are those of {file}",
    ]  # fmt: skip
    assert main(["env", "replay", f"{MODULE}:own_NanReward", "--from", file]) == 1


def test_recordings_of_a_policy_have_actions_by_agent() -> None:
    make = partial(broken_agents.OwnTurns, broken_agents.Match)
    recording = EpisodeRecording.record(make, policy=lambda observations: dict.fromkeys(observations, 2))
    assert recording.actions[:3] == [[["a", 2]], [["b", 2]], [["a", 2]]]
    assert recording.replay(make) is None


def test_names_of_agents_that_no_file_can_have_are_refused() -> None:
    class Pairs(broken_agents.Own):
        def reset(self, **options: Any) -> Any:
            observations, infos = super().reset(**options)
            return {(agent, 0): each for agent, each in observations.items()}, infos

        def get_action_space(self, agent_id: Any) -> Any:
            return super().get_action_space(agent_id[0])

        def step(self, actions: Any) -> Any:
            return super().step({agent[0]: action for agent, action in actions.items()})

    with pytest.raises(UsageError, match=r"a recording names agents by text or whole numbers, not by \('a', 0\)"):
        EpisodeRecording.record(lambda: Pairs(broken_agents.Match))
