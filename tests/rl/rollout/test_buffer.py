"""`SampleBuffer` and `Pipeline`: order, staleness, back-pressure, refill, saved states."""

from __future__ import annotations

import random

import pytest

from rlmesh.errors import UsageError
from rlmesh.rl.rollout.buffer import GroupSlot, SampleBuffer
from rlmesh.rl.rollout.pipeline import Pipeline
from tests.rl.rollout.fakes import group_of, scored


def key_of(position: int) -> tuple[int, int]:
    return divmod(position, 16)


def sample(buffer: SampleBuffer, slot: GroupSlot, version: int | None = None) -> None:
    """Sample and score a slot."""
    buffer.ask(slot)
    group = group_of(slot.position, buffer.version or 0 if version is None else version)
    buffer.sampled(slot, group)
    buffer.scored(slot, scored([group])[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sync", Pipeline("sync", 0, drains=True)),
        ("one-step-off", Pipeline("one-step-off", 1, drains=True)),
        ("async", Pipeline("async", 1, drains=False)),
        ("async(staleness=3)", Pipeline("async", 3, drains=False)),
        (" async( 2 ) ", Pipeline("async", 2, drains=False)),
    ],
)
def test_pipelines_are_read_from_text(text: str, expected: Pipeline) -> None:
    assert Pipeline.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("one_step_off", "did you mean 'one-step-off'"),
        ("asinc(staleness=2)", "did you mean 'async'"),
        ("async(staleness=0)", "must be ≥ 1"),
        ("async(staleness=-1)", "must be ≥ 1"),
        ("rush", "there is 'sync', 'one-step-off'"),
    ],
)
def test_other_texts_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        Pipeline.parse(text)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_limits_the_slots(staleness: int) -> None:
    buffer = SampleBuffer(4, staleness, steps=10)
    assert buffer.draw(key_of) == [], "no engine has weights yet"
    buffer.advance(0)
    assert len(buffer.draw(key_of)) == 4 * (staleness + 1)
    for slot in buffer.askable():
        sample(buffer, slot)
    assert buffer.draw(key_of) == [] and buffer.askable() == [], "engines wait"
    taken = buffer.take(1)
    assert taken is not None and [slot.position for slot in taken] == [0, 1, 2, 3]
    assert buffer.draw(key_of) == [], "taking alone frees nothing: a later group would be too old"
    buffer.trained(1)
    buffer.advance(1)
    assert [slot.position // 4 for slot in buffer.draw(key_of)] == [staleness + 1] * 4


def test_nothing_is_drawn_beyond_the_last_step() -> None:
    buffer = SampleBuffer(4, 3, steps=2)
    buffer.advance(0)
    assert len(buffer.draw(key_of)) == 8


def test_a_slow_group_is_waited_for() -> None:
    buffer = SampleBuffer(2, 1, steps=5)
    buffer.advance(0)
    first, *others = buffer.draw(key_of)
    for slot in others:
        sample(buffer, slot)
    buffer.ask(first)
    assert buffer.take(1) is None
    buffer.sampled(first, group_of(0, 0))
    assert buffer.take(1) is None, "it has no reward yet"
    buffer.scored(first, scored([group_of(0, 0)])[0])
    assert [slot.position for slot in buffer.take(1) or ()] == [0, 1]


def test_the_bound_is_checked_when_a_step_takes_its_groups() -> None:
    buffer = SampleBuffer(2, 1, steps=9)
    buffer.advance(3)
    buffer.step = 4
    for slot in buffer.draw(key_of):
        sample(buffer, slot, version=1 if slot.position == 1 else 2)
    assert buffer.take(4) is None and buffer.renewed == 1
    (old,) = buffer.askable()
    assert old.position == 1 and "too old for step 4" in old.reason
    sample(buffer, old)
    assert [slot.position for slot in buffer.take(4) or ()] == [0, 1]


def test_a_group_that_became_too_old_while_it_was_sampled_is_not_waited_for() -> None:
    buffer = SampleBuffer(2, 1, steps=9)
    buffer.advance(3)
    buffer.step = 4
    first, second, *_ = buffer.draw(key_of)
    sample(buffer, first)
    buffer.ask(second)
    buffer.sampled(second, group_of(second.position, 1))
    assert buffer.unscored() == [], "its rewards must not decide"
    assert buffer.take(4) is None and buffer.askable()[0] is second
    sample(buffer, second)
    assert buffer.take(4) == [first, second]


def test_dropped_and_failed_groups_are_replaced_and_the_batch_stays_constant() -> None:
    buffer = SampleBuffer(3, 0, steps=4, refill=1.0)
    buffer.advance(0)
    for slot in buffer.draw(key_of):
        sample(buffer, slot)
    first, second, third = buffer.waiting
    assert buffer.drop(first, "equal") and buffer.fail(second, "no reward") == 1
    assert [slot.position for slot in buffer.draw(key_of)] == [3, 4]
    for slot in buffer.askable():
        sample(buffer, slot)
    assert buffer.drop(buffer.waiting[1], "equal") and buffer.drop(buffer.waiting[1], "equal")
    for slot in buffer.draw(key_of):
        sample(buffer, slot)
    assert not buffer.drop(buffer.waiting[2], "equal"), "the refill is bounded: 3 groups were dropped for this step"
    taken = buffer.take(1)
    assert taken is not None and len(taken) == 3 and taken[0] is third
    buffer.trained(1)
    buffer.advance(1)
    for slot in buffer.draw(key_of):
        sample(buffer, slot)
    assert buffer.drop(buffer.waiting[0], "equal"), "the next step has a bound of its own"


def test_extra_groups_are_sampled_at_once_and_asked_again_when_too_old() -> None:
    buffer = SampleBuffer(4, 0, steps=9, extra=2, refill=1.0)
    buffer.advance(0)
    for slot in buffer.draw(key_of):
        sample(buffer, slot)
    assert len(buffer.waiting) == 6
    buffer.drop(buffer.waiting[0], "equal")
    assert [slot.position for slot in buffer.take(1) or ()] == [1, 2, 3, 4], "no wait for a replacement"
    buffer.trained(1)
    buffer.advance(1)
    assert [(slot.position, slot.state) for slot in buffer.waiting] == [(5, "drawn")], "its version is 0"


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_answers_trains_each_prompt_once_in_drawing_order(seed: int) -> None:
    source = random.Random(seed)
    staleness, size, steps = source.randrange(4), source.randrange(1, 6), 12
    trained: list[int] = []
    buffer = SampleBuffer(
        size, staleness, steps, refill=2.0, extra=source.randrange(3),
        record=lambda slot: trained.append(slot.position) if slot.state == "trained" else None,
    )  # fmt: skip
    lost: set[int] = set()
    running: list[tuple[GroupSlot, int]] = []
    version, step = 0, 1
    buffer.advance(0)
    for _ in range(20_000):
        if step > steps:
            break
        buffer.draw(key_of)
        moves = [("ask", slot) for slot in buffer.askable()] + [("answer", one) for one in running] + [("take", None)]
        what, which = source.choice(moves)
        if what == "ask":
            buffer.ask(which)  # type: ignore[arg-type]
            running.append((which, version))  # type: ignore[arg-type]
        elif what == "answer":
            running.remove(which)  # type: ignore[arg-type]
            slot, began = which  # type: ignore[misc]
            if source.random() < 0.1:
                buffer.ask_again(slot, "died", died=True)
                continue
            group = group_of(slot.position, began, newest=version)
            buffer.sampled(slot, group)
            if source.random() < 0.1 and buffer.drop(slot, "equal"):
                lost.add(slot.position)
            else:
                buffer.scored(slot, group)
        elif (taken := buffer.take(step)) is not None:
            assert len(taken) == size
            assert all(slot.versions and step - 1 - slot.versions[0] <= staleness for slot in taken)
            buffer.trained(step)
            version, step = step, step + 1
            buffer.advance(version)
    assert step == steps + 1
    assert trained == [position for position in range(trained[-1] + 1) if position not in lost]


def test_a_saved_state_goes_on_with_the_same_groups() -> None:
    buffer = SampleBuffer(2, 1, steps=9)
    buffer.advance(0)
    slots = buffer.draw(key_of)
    for slot in slots[:3]:
        sample(buffer, slot)
    buffer.ask(slots[3])
    buffer.take(1)
    buffer.trained(1)
    state = buffer.state()
    other = SampleBuffer(2, 1, steps=9)
    other.restore(state)
    assert (other.cursor, other.step, other.version) == (4, 2, None)
    assert [(slot.position, slot.ready) for slot in other.waiting] == [(2, True), (3, False)]
    assert other.waiting[0].group is slots[2].group
    other.advance(1)
    assert [slot.position for slot in other.askable()] == [3]


def test_a_group_that_was_sampled_since_a_death_is_no_suspect_when_it_is_sampled_again() -> None:
    buffer = SampleBuffer(1, 0, steps=9)
    buffer.advance(0)
    buffer.draw(key_of)
    (slot,) = buffer.waiting
    buffer.ask_again(slot, "died", died=True)
    assert slot.deaths == 1
    buffer.sampled(slot, group_of(slot.position, 0))
    buffer.ask_again(slot, "too old")
    assert (slot.state, slot.deaths) == ("drawn", 0)


def test_poison_stays_set_aside_when_the_run_goes_back() -> None:
    buffer = SampleBuffer(2, 0, steps=9)
    buffer.advance(0)
    buffer.draw(key_of)
    buffer.ask_again(buffer.waiting[1], "died", died=True)
    buffer.fail(buffer.waiting[0], "poison: it kills", poison=True)
    buffer.restore({"cursor": 0, "step": 1, "slots": []})
    buffer.advance(0)
    buffer.draw(key_of)
    assert [(slot.position, slot.deaths) for slot in buffer.waiting] == [(1, 1), (2, 0)]
