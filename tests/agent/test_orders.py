"""What the main thread of a member is told to do, by other threads and at the worst moment."""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import pytest

from rlmesh.agent.processes import ownership
from rlmesh.agent.worker.control import Control, Order, Orders
from rlmesh.job.restarts import RestartEvent
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S


class _Runtime:
    """Serves until it is told to stop; ``stops`` are those that nobody has taken."""

    def __init__(self) -> None:
        self.stops: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run_main(self) -> None:
        self.stops.get(timeout=HANG_S)

    def stop_main(self, *, now: bool = False) -> None:
        self.stops.put(None)


class _Slow(deque[Order]):
    """An order is in the queue for a while before whoever gives it goes on."""

    def __init__(self, meanwhile: Any) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def append(self, order: Order) -> None:
        super().append(order)
        self._meanwhile()


def test_an_order_that_is_taken_at_once_ends_nothing_that_comes_later() -> None:
    runtime = _Runtime()
    orders = Orders(cast(Runtime, runtime), 1.0)
    taken: list[Order] = []
    main = threading.Thread(target=lambda: taken.append(orders.take()))

    def meanwhile() -> None:
        main.start()
        main.join(0.3)  # if it can, it takes the order now, before the other thread looks what the main thread does

    orders._queue = _Slow(meanwhile)
    assert orders.begin_run("") is False  # it has no run() yet
    orders.runs = "TRAINER:0"
    assert orders.begin_run("TRAINER:0") is True
    main.join(HANG_S)
    assert taken == ["run"] and orders.phase == "running"
    assert runtime.stops.empty(), "the thread that serves calls during run() would take this for its own end"


def test_orders_come_in_their_order_and_wake_who_serves() -> None:
    runtime = _Runtime()
    orders = Orders(cast(Runtime, runtime), 1.0)
    taken: list[Order] = []
    main = threading.Thread(target=lambda: taken.extend((orders.take(), orders.take(), orders.take())))
    main.start()
    while orders.phase != "serving":
        main.join(0.001)
    orders.give("run")
    orders.give("end")
    orders.give("end")
    main.join(HANG_S)
    assert taken == ["run", "end", "end"]


def test_a_restart_that_a_second_master_tells_again_is_one_event() -> None:
    orders = Orders(cast(Runtime, _Runtime()), 1.0)
    heard: list[RestartEvent] = []
    orders.listen(heard.append)
    event = RestartEvent("ACTOR", (0,), "restarting", "member", (1,), "killed by SIGKILL", 1, 100.0)
    ready = replace(event, phase="ready", restored=(3,))
    for each in (event, event, ready, event, ready):
        orders.note_restart(each)
        orders.tell_listeners()
    assert heard == [event, ready]
    assert orders.take_events(0.0) == (event, ready)


async def test_a_notice_that_a_second_master_passes_on_again_calls_the_handler_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ownership.SHARED_SIGNALS, raising=False)
    called: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        called.append(number)

    nothing: Any = None
    control = Control(nothing, Orders(cast(Runtime, _Runtime()), 1.0), nothing, nothing, "TRAINER:0")
    before = signal.signal(signal.SIGUSR1, note)
    try:
        for _ in range(2):
            assert await control.hold_step("SIGUSR1") is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert called == [signal.SIGUSR1]
