"""The order in which a sink takes what several source ranks send: each sink begins with another rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from rlmesh import ArraySink
from rlmesh.weights.channels.base import ChannelReceiver, RouteSettings
from rlmesh.weights.transfer import receiver as receiver_module
from rlmesh.weights.transfer.receiver import Receiver
from tests.own_time import HANG_S

PUSHES = (2**40, 7)
"""Numbers of pushes are drawn, so that a later one may be smaller."""


class Taking(Receiver):
    """A sink that only notes what it takes, in which order; each command takes as long as ``hold`` says."""

    def __init__(self, who: str) -> None:
        super().__init__(ArraySink({"a": np.zeros(1)}), who)
        self.taken: list[tuple[str, int]] = []
        self.hold = threading.Event()

    def _stage(self, session: Any, route: Any, push: int, version: int, buckets: tuple[int, int], *_: Any) -> None:
        self.taken.append((route.settings.source, buckets[0]))
        assert self.hold.wait(HANG_S)


def attached(who: str, sinks: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> Taking:
    monkeypatch.setattr(receiver_module, "open_receiver", lambda *_: ChannelReceiver)
    taking = Taking(who)
    for source, order in sinks.items():
        settings = RouteSettings("s", "job", 0, source, order, keep=False, timeout_s=HANG_S, on_gpu=True)
        taking.attach(settings, "cuda_ipc", (), {})
    return taking


def send(taking: Taking, source: str, turn: int, push: int = PUSHES[0]) -> threading.Thread:
    command = threading.Thread(target=taking.stage, args=("s", push, 1, source, turn, (turn, 1), None, [], 1.0))
    command.start()
    return command


ORDERS: dict[str, tuple[str, ...]] = {"A:0": ("S:0", "S:1"), "A:1": ("S:1", "S:0")}


@pytest.mark.parametrize(("who", "first", "second"), [("S:0", "A:0", "A:1"), ("S:1", "A:1", "A:0")])
def test_each_sink_begins_with_another_rank(who: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "ORDER_WAIT_S", HANG_S)
    taking = attached(who, ORDERS, monkeypatch)
    for push in PUSHES:
        taking.hold.clear()
        taking.taken.clear()
        commands = [send(taking, second, 0, push)]
        time.sleep(0.05)
        assert not taking.taken, "it waits for the rank that it should read first"
        commands.append(send(taking, first, 0, push))
        while not taking.taken:
            time.sleep(0.001)
        commands += [send(taking, first, 1, push), send(taking, second, 1, push)]
        while len(taking._sessions["s"].coming) < len(commands):  # all have come while the first is under way
            time.sleep(0.001)
        taking.hold.set()
        for command in commands:
            command.join(HANG_S)
        assert taking.taken == [(first, 0), (second, 0), (first, 1), (second, 1)]


def test_a_rank_that_is_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = attached("S:0", ORDERS, monkeypatch)
    taking.hold.set()
    for command in [send(taking, "A:1", 0), send(taking, "A:1", 1)]:
        command.join(HANG_S)
    send(taking, "A:0", 0).join(HANG_S)
    assert taking.taken == [("A:1", 0), ("A:1", 1), ("A:0", 0)]
