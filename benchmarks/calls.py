"""How fast are starts and calls on this machine? Run it with nothing else running: python benchmarks/calls.py

A job without torch: eight members of a role that answers, and one that measures. Every number is the median of
``ROUNDS`` rounds; latencies are of calls made one after the other.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from rlmesh import DLJobBuilder, RoleGroup, current_worker, rpc

MEMBERS = 8
ROUNDS = 5
ECHOES = 500
WINDOW = 1000
ITEMS = 4096


class Echo:
    @rpc
    def echo(self, value: Any) -> Any:
        return value


class Meter:
    """Measures in ``run()`` and leaves the figures in the run directory."""

    def run(self) -> None:
        group: RoleGroup[Any] = RoleGroup("ECHO")
        one = group[0]
        items = list(range(ITEMS))
        group.call("echo", 0).result()  # every connection is open
        figures = {
            "echo, one member, p50, µs": 1e6 * _median(lambda: _latency(lambda: one.call("echo", 0).result())),
            "pipelined calls to one member, 1/s": _median(lambda: _rate(one)),
            f"group call to {MEMBERS}, p50, µs": 1e6
            * _median(lambda: _latency(lambda: group.call("echo", 0).result())),
            f"batch call of {ITEMS} numbers, p50, µs": 1e6
            * _median(lambda: _latency(lambda: list(group.call_batch("echo", ITEMS, items)))),
        }
        (current_worker().run_dir / "figures.json").write_text(json.dumps(figures))


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(ROUNDS))


def _latency(call: Callable[[], object]) -> float:
    """Median seconds of one call."""
    times = []
    for _ in range(ECHOES // ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _rate(member: Any) -> float:
    """Calls per second with ``WINDOW`` of them on their way."""
    start = time.perf_counter()
    for future in [member.call("echo", i) for i in range(WINDOW)]:
        future.result()
    return WINDOW / (time.perf_counter() - start)


def main() -> None:
    job = DLJobBuilder().role("ECHO").run(Echo).total(MEMBERS).role("METER").run(Meter).build()
    results = [job.submit("bench-calls", view="none") for _ in range(ROUNDS)]
    first = statistics.median(result.status.first_serving_s or 0.0 for result in results)
    every = statistics.median(result.status.all_serving_s or 0.0 for result in results)
    figures = [json.loads((result.run_dir / "figures.json").read_text()) for result in results]
    rows = {
        "submit to first member serving, s": f"{first:.2f}",
        f"submit to all {MEMBERS + 1} members serving, s": f"{every:.2f}",
        **{name: f"{statistics.median(run[name] for run in figures):,.0f}" for name in figures[0]},
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value:>10}")


if __name__ == "__main__":
    main()
