"""Counts the Python calls of one warm push of one small tensor to two sinks.

    python benchmarks/push_path.py [--remote] [--modules] [--functions]

All members are in one process, each with its own runtime; the trainer pushes its own weights. The first pushes make the
plan and are not counted. Of the others the median is printed: calls on all threads, and the modules of
`rlmesh.weights` that take part.
"""

from __future__ import annotations

import argparse
import collections
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeAlias

import numpy as np

from rlmesh import ArraySink, ArraySource, ReceivesWeights, RoleGroup, SendsWeights, WeightSync
from rlmesh.testing import InProcessCluster

Calls: TypeAlias = "collections.Counter[tuple[str, str]]"
PACKAGE = Path(__file__).resolve().parent.parent / "rlmesh"
WEIGHTS = {"weight": np.arange(16, dtype=np.float32)}
QUIET_S = 0.05
"""Answers and releases that follow a push belong to it."""


class Sink(ReceivesWeights):
    def setup(self) -> None:
        self.receive_weights(ArraySink({"weight": np.zeros(16, np.float32)}))


class Source(SendsWeights):
    def setup(self) -> None:
        self.send_weights(ArraySource(WEIGHTS))


class CallCounter:
    """Counts Python functions that any thread enters; threads that start later than `install` are seen."""

    def __init__(self) -> None:
        self._found: Calls | None = None

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        found = self._found
        if found is not None and event == "call":
            found[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def during(self, work: Callable[[], object]) -> Calls:
        """(file, function) → how often it was entered during ``work``."""
        found = self._found = collections.Counter()
        work()
        time.sleep(QUIET_S)
        self._found = None
        return found


def module_of(file: str) -> str:
    path = Path(file)
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts) if path.is_relative_to(PACKAGE) else ""


class Trainer:
    """Pushes weights of its own, or with ``remote`` those of the member ACTOR:0, and counts."""

    counter = CallCounter()
    remote = False
    pushes = 15

    def run(self) -> None:
        source: Any = RoleGroup("ACTOR") if self.remote else ArraySource(WEIGHTS)
        with WeightSync(source, RoleGroup("ROLLOUT")) as sync:
            print(sync.plan())
            versions = iter(range(1, 1000))

            def push() -> None:
                sync.push(next(versions)).result()

            for _ in range(5):
                push()
            counted = [self.counter.during(push) for _ in range(self.pushes)]
        Trainer.counted = sorted(counted, key=lambda calls: calls.total())

    counted: ClassVar[list[Calls]] = []


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the Python calls of one warm push.")
    parser.add_argument("--pushes", type=int, default=15, help="pushes that are counted")
    parser.add_argument("--remote", action="store_true", help="the source is a member too, not the one that pushes")
    parser.add_argument("--modules", action="store_true", help="list calls by module")
    parser.add_argument("--functions", action="store_true", help="list calls by function")
    options = parser.parse_args()
    Trainer.counter.install()
    Trainer.remote, Trainer.pushes = options.remote, options.pushes
    with InProcessCluster("unix") as cluster:
        cluster.add("ROLLOUT", Sink, 2)
        if options.remote:
            cluster.add("ACTOR", Source)
        cluster.run("TRAINER", Trainer)
    counted = Trainer.counted
    median = counted[len(counted) // 2]
    by_module = collections.Counter[str]()
    for (file, _), count in median.items():
        by_module[module_of(file)] += count
    weights = {name: count for name, count in by_module.items() if name.startswith("weights.")}
    product = sum(count for name, count in by_module.items() if name)
    print(
        f"{median.total():,} Python calls, {product:,} of them of rlmesh and {sum(weights.values()):,} of "
        f"rlmesh.weights; {len(weights)} modules of rlmesh.weights"
    )
    print(f"{len(counted)} pushes: {counted[0].total():,} to {counted[-1].total():,} calls")
    if options.modules:
        for name, count in by_module.most_common():
            print(f"{count:6}  {name or '(other)'}")
    if options.functions:
        for (file, function), count in median.most_common(400):
            print(f"{count:6}  {module_of(file) or Path(file).name}  {function}")


if __name__ == "__main__":
    main()
