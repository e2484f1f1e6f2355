"""Roles that share a device: at most one of their parts is awake."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlmesh.rl.roles.device_turns import DeviceTurns
from tests.rl import turns_job
from tests.rl.test_run import launched, reported

Event = Sequence[Any]
"""Time, member, part, "wakes", "was awake" or "sleeps", bytes of the part, bytes of the process on its GPU."""


def overlaps(events: Sequence[Event]) -> list[str]:
    """A sentence for each part that wakes while another is awake."""
    awake: set[tuple[str, str]] = set()
    found = []
    for at, member, part, event, *_ in sorted(events, key=tuple):
        if event == "sleeps":
            awake.discard((member, part))
        if event != "wakes":
            continue
        found += [f"{at}: {member}'s {part} wakes beside {other}" for other in sorted(awake)]
        awake.add((member, part))
    return found


def test_two_that_are_awake_are_found() -> None:
    good = [
        (1.0, "A:0", "x", "wakes", 9), (1.9, "A:0", "x", "was awake", 9), (2.0, "A:0", "x", "sleeps", 0),
        (3.0, "B:0", "y", "wakes", 9),
    ]  # fmt: skip
    assert overlaps(good) == []
    assert overlaps([*good, (1.5, "C:0", "z", "wakes", 9)]) == [
        "1.5: C:0's z wakes beside ('A:0', 'x')",
        "3.0: B:0's y wakes beside ('C:0', 'z')",
    ]


def recorded(turns: DeviceTurns, *names: str) -> list[str]:
    seen: list[str] = []
    for name in names:
        turns.add(name, wake=partial(seen.append, f"{name} wakes"), sleep=partial(seen.append, f"{name} sleeps"))
        turns.sleep()
    seen.clear()
    return seen


def test_a_process_alone_switches_only_when_another_part_is_needed() -> None:
    turns = DeviceTurns(leased=False)
    seen = recorded(turns, "training", "rollout")
    for name in ("training", "training", "rollout", "training"):
        with turns.turn(name):
            assert turns.awake == name
    assert seen == [
        "training wakes", "training sleeps", "rollout wakes", "rollout sleeps", "training wakes",
    ]  # fmt: skip


def test_a_part_that_cannot_wake_is_not_awake() -> None:
    turns = DeviceTurns(leased=False)

    def fails() -> None:
        raise MemoryError("no room")

    turns.add("training", wake=fails, sleep=lambda: None)
    turns.sleep()
    with pytest.raises(MemoryError), turns.turn("training"):
        raise AssertionError("the block does not begin")
    assert turns.awake is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "fused"])
def test_never_are_two_awake_on_one_device(tiny: Path, tmp_path: Path, kind: str) -> None:
    run_dir = launched(turns_job.__file__, tmp_path / kind, str(tiny), kind)
    events = [json.loads(line) for line in (run_dir / turns_job.FILE).read_text().splitlines()]
    parts = {(member, part) for _, member, part, *_ in events}
    sampler, keeper = ("ACTOR:0", "ACTOR:0") if kind == "fused" else ("ROLLOUT:0", "REFERENCE:0")
    assert parts == {
        ("ACTOR:0", "training"), ("CRITIC:0", "training"), (sampler, "rollout"), (keeper, "reference"),
    }  # fmt: skip
    assert overlaps(events) == []
    # Whoever sleeps has no memory on the device, and each part had its turn in every step.
    assert {held for *_, event, held, _ in events if event == "sleeps"} == {0}
    assert min(held for *_, event, held, _ in events if event == "was awake") > 0
    for member, part in parts:
        wakes = [event for event in events if event[1:4] == [member, part, "wakes"]]
        assert len(wakes) >= 5, f"{member} {part}"
    assert sorted(reported(run_dir)) == [1, 2, 3, 4]
