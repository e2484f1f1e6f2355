from __future__ import annotations

import time

import pytest

from rlmesh.errors import RLMeshError
from rlmesh.runtime.observed import FOLD_AT, CallWatch, EndedCall, message_bytes
from rlmesh.runtime.rpc import rpc
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
    mesh.caller.take_edges()
    for _ in range(64):
        group.call("echo", b"x" * 1000).result()
    group[1].notify("echo", b"")
    with pytest.raises(ValueError):
        group[0].call("fail").result()
    edges = {(edge.callee, edge.method): edge for edge in mesh.caller.take_edges()}
    assert set(edges) == {("E:0", "echo"), ("E:1", "echo"), ("E:0", "fail")}
    assert edges["E:0", "echo"].calls == 64 and edges["E:1", "echo"].calls == 65
    assert edges["E:0", "echo"].failed == edges["E:0", "fail"].failed == 0, "an error is an answer"
    for edge in (edges["E:0", "echo"], edges["E:1", "echo"]):
        assert 16_000 <= edge.sent_bytes <= 128_000 and 16_000 <= edge.received_bytes <= 128_000
        assert 0 < edge.method_s <= edge.wall_s
    assert mesh.caller.take_edges() == ()


def test_large_messages_are_measured_one_by_one(mesh: Mesh) -> None:
    numpy = pytest.importorskip("numpy")
    group = mesh.serve("E", Echo())
    mesh.caller.take_edges()
    group.call("echo", numpy.zeros(1 << 20, numpy.uint8)).result()
    (edge,) = mesh.caller.take_edges()
    assert 1 << 20 <= edge.sent_bytes < (1 << 20) + 2000
    assert 1 << 20 <= edge.received_bytes < (1 << 20) + 2000


def test_a_call_without_answer_counts_as_such(mesh: Mesh) -> None:
    group = mesh.serve("E", Echo())
    mesh.caller.take_edges()
    with pytest.raises(RLMeshError):
        group.options(timeout_s=0.05).call("slow").result()
    edges = mesh.caller.take_edges()
    assert [(edge.calls, edge.failed) for edge in edges] == [(1, 1)]


def test_nobody_has_to_take() -> None:
    watch = CallWatch()
    seen: list[EndedCall] = []
    watch.trace = seen.extend
    for number in range(3 * FOLD_AT):
        watch.note(("@master" if number % 2 else "A:0", "m", number, 10, 30, True, 5, 1, 2, 3))
    (edge,) = watch.take()
    assert (edge.callee, edge.calls) == ("A:0", 3 * FOLD_AT / 2)
    assert edge.wall_s == pytest.approx(20e-9 * edge.calls) and edge.sent_bytes == 2 * edge.calls
    assert len(seen) == 3 * FOLD_AT
    assert len(watch._ended) == 0


def test_what_counts_as_bytes_of_a_message() -> None:
    assert message_bytes([b"x" * 10]) == 10
    assert message_bytes([b"x", memoryview(bytes(100))]) == 101
    assert message_bytes([]) == 0
