"""What a sink serves, whatever comes in whatever order."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import WeightsNotReady, WeightSyncError
from rlmesh.weights.planning.plan import Mode
from rlmesh.weights.sink_state import SinkState, VersionGate
from tests.own_time import HANG_S

COMMANDS = st.lists(
    st.tuples(st.sampled_from(["begin", "add", "flip", "conclude", "abort", "rollback"]), st.integers(1, 3)),
    max_size=40,
)


@given(st.sampled_from(["double_buffer", "in_place"]), COMMANDS)
def test_no_order_of_commands_makes_it_serve_what_was_not_committed(
    mode: Mode, commands: list[tuple[str, int]]
) -> None:
    state, staged, committed = SinkState(mode), 0, set[int]()
    for command, push in commands:
        before = state
        try:
            if command == "begin":
                state, staged = state.begin(push, 100 + push, 2), 0
            elif command == "add":
                state = state.add(push, staged)
                staged += 1
            elif command in ("flip", "conclude"):
                state = getattr(state, command)(push)
            else:
                state = getattr(state, command)()
        except WeightSyncError:
            assert state is before
            continue
        if command == "flip":
            assert staged >= 2 and not state.serves, "a flip that is not concluded is not served"
        if command == "conclude":
            assert state.version is not None
            committed.add(state.version)
        if state.serves:
            assert state.version in committed
            assert mode == "double_buffer" or state.phase == "idle", "in_place serves nothing while it is overwritten"


def test_an_aborted_flip_gives_the_old_version_back() -> None:
    state = SinkState("double_buffer").begin(1, 10, 1).add(1, 0).flip(1).conclude(1)
    flipped = state.begin(2, 20, 1).add(2, 0).flip(2)
    assert (flipped.version, flipped.previous, flipped.serves) == (20, 10, False)
    assert flipped.abort().version == 10 and flipped.abort().serves
    assert flipped.conclude(2).rollback().version == 10
    in_place = SinkState("in_place").begin(1, 10, 1).add(1, 0).flip(1).conclude(1)
    assert in_place.version == 10
    assert in_place.begin(2, 20, 1).abort().version is None


def test_an_incomplete_version_is_not_flipped() -> None:
    with pytest.raises(
        WeightSyncError, match="version 7 is not complete: 2 of 3 buckets are missing, the first is bucket 0"
    ):
        SinkState("in_place").begin(1, 7, 3).add(1, 1).flip(1)
    with pytest.raises(WeightSyncError, match="for push 2 while staging, but the sink is staging, push 1"):
        SinkState("in_place").begin(1, 7, 3).add(2, 1)


def test_the_gate_waits_for_those_inside_and_lets_nobody_overtake() -> None:
    gate = VersionGate("R:0")
    with pytest.raises(WeightsNotReady, match="R:0 has no weights to serve: no weights have come yet"), gate.serving():
        pass
    gate.set_version(1)
    inside, leave, order = threading.Event(), threading.Event(), list[str]()

    def long_request() -> None:
        with gate.serving() as version:
            inside.set()
            assert leave.wait(HANG_S)
            with gate.serving() as again:  # deeper, while the flip waits: no deadlock
                order.append(f"old {version} {again}")

    def late_request() -> None:
        with gate.serving() as version:
            order.append(f"late {version}")

    first = threading.Thread(target=long_request)
    first.start()
    assert inside.wait(HANG_S)
    with pytest.raises(WeightSyncError, match=r"R:0 still serves 1 requests with version 1 after 0.01 s"):
        gate.close("a flip", 0.01)

    def flip() -> None:
        gate.close("a flip", 5)
        gate.set_version(2)
        gate.open()

    flipping = threading.Thread(target=flip)
    flipping.start()
    while gate._closed_for is None:
        pass
    late = threading.Thread(target=late_request)
    late.start()
    leave.set()
    for thread in (first, flipping, late):
        thread.join(HANG_S)
    assert order == ["old 1 1", "late 2"]
    gate.close("a flip to version 3 is not concluded", 1)
    with (
        pytest.raises(WeightsNotReady, match="cannot serve: a flip to version 3 is not concluded since"),
        gate.serving(0.01),
    ):
        pass
    gate.open()
