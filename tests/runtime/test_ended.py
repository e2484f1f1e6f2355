"""Ended calls: the edges of the graph, and where the time of calls goes."""

from __future__ import annotations

import time

import pytest

from rlmesh.errors import RLMeshError
from rlmesh.runtime.calling.call_stats import FOLD_AT, CallGroup, CallRecorder, EndedCall
from rlmesh.runtime.rpc import rpc
from rlmesh.wire import codec
from tests.own_time import OwnTime
from tests.runtime.conftest import Mesh


class Echo:
    @rpc
    def echo(self, data: bytes) -> bytes:
        return data

    @rpc
    def slow(self) -> None:
        time.sleep(0.2)

    @rpc
    def fail(self) -> None:
        raise ValueError("no")


def test_each_member_of_a_group_is_an_edge(mesh: Mesh) -> None:
    group = mesh.serve("E", Echo(), Echo())
    mesh.caller.activity.call_stats.take_edges()
    for _ in range(64):
        group.call("echo", b"x" * 1000).result()
    group[1].notify("echo", b"")
    with pytest.raises(ValueError):
        group[0].call("fail").result()
    edges = {(edge.callee, edge.method): edge for edge in mesh.caller.activity.call_stats.take_edges()}
    assert set(edges) == {("E:0", "echo"), ("E:1", "echo"), ("E:0", "fail")}
    assert edges["E:0", "echo"].calls == 64 and edges["E:1", "echo"].calls == 65
    assert edges["E:0", "echo"].failed == edges["E:0", "fail"].failed == 0, "an error is an answer"
    for edge in (edges["E:0", "echo"], edges["E:1", "echo"]):
        assert 16_000 <= edge.sent_bytes <= 128_000 and 16_000 <= edge.received_bytes <= 128_000
        assert 0 < edge.method_s <= edge.wall_s
    assert mesh.caller.activity.call_stats.take_edges() == ()


def test_large_messages_are_measured_one_by_one(mesh: Mesh) -> None:
    numpy = pytest.importorskip("numpy")
    group = mesh.serve("E", Echo())
    mesh.caller.activity.call_stats.take_edges()
    group.call("echo", numpy.zeros(1 << 20, numpy.uint8)).result()
    (edge,) = mesh.caller.activity.call_stats.take_edges()
    assert 1 << 20 <= edge.sent_bytes < (1 << 20) + 2000
    assert 1 << 20 <= edge.received_bytes < (1 << 20) + 2000


def test_a_call_without_answer_counts_as_such(mesh: Mesh) -> None:
    group = mesh.serve("E", Echo())
    mesh.caller.activity.call_stats.take_edges()
    with pytest.raises(RLMeshError):
        group.options(timeout_s=0.05).call("slow").result()
    edges = mesh.caller.activity.call_stats.take_edges()
    assert [(edge.calls, edge.failed) for edge in edges] == [(1, 1)]


def ended(
    name: str, method: str, started_ns: int, ended_ns: int, executed_ns: int = 0, queued_ns: int = 0,
    waited_ns: int = 0, run_queue_ns: int = 0, *, answered: bool = True, group: CallGroup | None = None,
) -> EndedCall:  # fmt: skip
    times = (executed_ns, queued_ns, 2, 3, waited_ns, run_queue_ns)
    return (name, method, started_ns, started_ns, ended_ns, answered, *times, group)


def test_nobody_has_to_take() -> None:
    calls = CallRecorder()
    seen: list[EndedCall] = []
    calls.trace = seen.extend
    for number in range(3 * FOLD_AT):
        calls.add(ended("@master" if number % 2 else "A:0", "m", 10, 30, 5, 1))
    (edge,) = calls.take_edges()
    assert (edge.callee, edge.calls) == ("A:0", 3 * FOLD_AT / 2)
    assert edge.wall_s == pytest.approx(20e-9 * edge.calls) and edge.sent_bytes == 2 * edge.calls
    assert len(seen) == 3 * FOLD_AT, "each once"
    assert len(calls._ended) <= FOLD_AT
    assert sum(stats.calls for stats in calls.take_stats()) == 3 * FOLD_AT
    assert calls._ended == [] and calls.take_edges() == () and calls.take_stats() == ()


def test_who_takes_the_edges_takes_nothing_from_the_times() -> None:
    calls = CallRecorder()
    calls.add(ended("A:0", "m", 0, 100))
    assert [edge.calls for edge in calls.take_edges()] == [1]
    calls.add(ended("A:0", "m", 50, 150))
    assert [edge.calls for edge in calls.take_edges()] == [1] and calls.take_edges() == ()
    (stats,) = calls.take_stats()
    assert stats.calls == 2 and stats.share_s == pytest.approx(150e-9), "the two overlap"
    calls.add(ended("A:0", "m", 200, 300))
    assert [stats.calls for stats in calls.take_stats()] == [edge.calls for edge in calls.take_edges()] == [1]


@pytest.mark.parametrize("bulk", [False, True])
def test_a_group_call_counts_once_and_as_its_slowest_member(bulk: bool) -> None:
    calls = CallRecorder()
    for number in range(FOLD_AT if bulk else 10):
        group = CallGroup(3)
        calls.add(ended("A:0", "m", 0, 100, 50, 10, group=group))
        calls.add(ended("A:1", "m", 0, 200, 80, 20, group=group))
        if number % 2:
            calls.take_edges()  # The sums of times wait for the group's last member.
        calls.add(ended("A:2", "m", 0, 300, answered=False, group=group))
    (stats,) = calls.take_stats()
    assert stats.calls == number + 1 and stats.slowest_rank == 1
    assert stats.method_s == pytest.approx(stats.calls * 80e-9)
    assert stats.wall_s == pytest.approx(stats.calls * 300e-9)


def test_only_calls_that_somebody_waited_for_and_that_were_answered_take_time() -> None:
    calls = CallRecorder()
    calls.add(ended("A:0", "m", 0, 100, waited_ns=-1))
    calls.add(ended("A:0", "m", 0, 100, answered=False))
    assert calls.take_stats() == ()
    (edge,) = calls.take_edges()
    assert (edge.calls, edge.failed) == (2, 1)


def test_what_counts_as_bytes_of_a_message() -> None:
    assert codec.size_bytes([b"x" * 10]) == 10
    assert codec.size_bytes([b"x", memoryview(bytes(100))]) == 101
    assert codec.size_bytes([]) == 0


class Slow:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @rpc
    def work(self) -> None:
        time.sleep(self.seconds)


def test_the_slowest_members_time_is_not_overhead(mesh: Mesh, own_time: OwnTime) -> None:
    group = mesh.serve("S", Slow(0.02), Slow(0.5), Slow(0.05))
    mesh.caller.activity.call_stats.take_stats()
    group.call("work").result()
    (stats,) = mesh.caller.activity.call_stats.take_stats()
    waited_s = own_time.waited_s
    assert (stats.role, stats.method, stats.calls) == ("S", "work", 1)
    assert stats.slowest_rank == 1
    assert 0.5 <= stats.method_s <= stats.wall_s < 0.85 + waited_s
    assert stats.overhead_s < 0.1 + waited_s
    assert mesh.caller.activity.call_stats.take_stats() == ()


def test_waiting_behind_another_call_is_queueing(mesh: Mesh, own_time: OwnTime) -> None:
    handle = mesh.serve("S", Slow(0.1))[0]
    for future in [handle.call("work") for _ in range(3)]:
        future.result()
    (stats,) = mesh.caller.activity.call_stats.take_stats()
    assert stats.calls == 3
    waited_s = own_time.waited_s
    # 0 + 0.1 + 0.2 and change. One delay of the member may keep two calls waiting.
    assert 0.25 < stats.queued_s < 0.6 + 2 * waited_s
    assert stats.overhead_s < 0.15 + 3 * waited_s
    # The three overlap: their shares add up to the time in which any was pending.
    assert 0.3 <= stats.share_s <= 0.6 + waited_s and stats.wall_s > stats.share_s


def test_many_calls_are_summed_in_bulk_to_the_same_totals() -> None:
    """4,500 calls of two methods, one after the other: the first 4,001 go the quick way."""
    calls = CallRecorder()
    for number in range(4500):
        began_ns = 1_000 * number
        method = "a" if number % 3 else "b"
        calls.add(ended(f"S:{number % 2}", method, began_ns, began_ns + 900, 400, 100, 50, 50))
    stats = {each.method: each for each in calls.take_stats()}
    assert {method: each.calls for method, each in stats.items()} == {"a": 3000, "b": 1500}
    for each in stats.values():
        assert each.wall_s == pytest.approx(each.calls * 900e-9)
        assert each.method_s == pytest.approx(each.calls * 400e-9)
        assert each.queued_s == pytest.approx(each.calls * 100e-9)
        assert each.run_queue_s == pytest.approx(each.calls * 100e-9)
        assert each.overhead_s == pytest.approx(each.calls * 300e-9)
        assert each.share_s == pytest.approx(each.calls * 900e-9)
        assert each.slowest_rank in (0, 1)


def test_calls_that_overlap_share_the_time_in_bulk_too() -> None:
    """4,001 calls, all pending during the same millisecond."""
    calls = CallRecorder()
    for number in range(4001):
        calls.add(ended("S:0", "a", number, 1_000_000 + number))
    (stats,) = calls.take_stats()
    assert stats.wall_s == pytest.approx(4001 * 1e-3)
    assert stats.share_s == pytest.approx(1.004e-3)
