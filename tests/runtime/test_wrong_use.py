"""Whatever calls are given, the answer is a result or an error of rlmesh's that says what is wrong, at once."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlmesh import Mesh, RoleGroup, Runtime, rpc, shared
from rlmesh.errors import RLMeshError
from rlmesh.testing import FaultPlan, InProcessCluster, LocalCluster
from tests.own_time import HANG_S


class Odd(enum.Enum):
    THING = 1


class Worker:
    @rpc
    def f(self, x: Any = None) -> Any:
        return x

    @rpc
    def g(self, xs: Any) -> Any:
        return xs

    @rpc
    def s(self, n: int = 3) -> Iterator[int]:
        yield from range(n)


JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 10**30, 1.5, float("nan"), float("inf"), "", "x", "é", "a" * 300, b"x", [], [1], (), {},
    {"a": 1}, set(), object(), int, Worker, lambda: 0, Odd.THING, "\0", range(3), 1 + 2j, ..., np.array(3),
    np.zeros((2, 2)), slice(None),
)  # fmt: skip
AT_ONCE_S = 3.0
SEQUENCE = (TypeError, IndexError)
"""What a list raises for an index that is none."""


class Faults:
    """What was neither right nor refused."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def attempt(self, told: str, work: Callable[[], object], also: tuple[type[Exception], ...] = ()) -> None:
        began = time.monotonic()
        try:
            work()
        except Exception as error:
            if not isinstance(error, (RLMeshError, *also)) or not str(error).strip():
                self.found.append(f"{told}: {type(error).__name__}: {error}")
        if (took := time.monotonic() - began) > AT_ONCE_S:
            self.found.append(f"{told}: {took:.1f} s")


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    assert not faults.found, "\n".join(faults.found)


@pytest.fixture
def group() -> Iterator[RoleGroup[Any]]:
    with InProcessCluster() as cluster:
        yield cluster.serve("W", Worker(), Worker(), axes={"dp": 2}).options(timeout_s=2 * AT_ONCE_S)


def test_junk_for_groups_and_methods_is_refused_by_name(group: RoleGroup[Any], faults: Faults) -> None:
    calls: dict[str, Callable[[Any], object]] = {
        "RoleGroup(junk)": lambda junk: RoleGroup(junk).call("f").result(HANG_S),
        "group=": lambda junk: RoleGroup("W", group=junk).call("f").result(HANG_S),
        "options=": lambda junk: RoleGroup("W", options=junk).call("f").result(HANG_S),
        "runtime=": lambda junk: RoleGroup("W", runtime=junk).call("f").result(HANG_S),
        "ranks=": lambda junk: RoleGroup("W", ranks=junk).call("f").result(HANG_S),
        "call": lambda junk: group.call(junk).result(HANG_S),
        "call_rank0": lambda junk: group.call_rank0(junk).result(HANG_S),
        "call_any": lambda junk: group.call_any(junk).result(HANG_S),
        "stream": lambda junk: list(group.stream(junk)),
        "call_batch": lambda junk: list(group.call_batch(junk, 1, [1])),
        "size": lambda junk: list(group.call_batch("g", junk, [1])),
        "batch": lambda junk: list(group.call_batch("g", 1, junk)),
        "shared": lambda junk: list(group.call_batch("g", 1, shared(junk))),
        "_scatter=": lambda junk: group.call("f", 1, _scatter=junk).result(HANG_S),
        "scattered": lambda junk: group.call("f", junk, _scatter=True).result(HANG_S),
        "return_exceptions=": lambda junk: group.options(return_exceptions=junk).call("f", 1).result(HANG_S),
        "along": lambda junk: group.along(junk).ranks,
        "along(dp=)": lambda junk: group.along(dp=junk).ranks,
        "Mesh": lambda junk: Mesh()[junk].ranks,
        "subgraphs": lambda junk: Mesh().subgraphs(junk),
        "subgraph": lambda junk: Mesh().subgraphs("dp")[0][junk],
        "run": lambda junk: list(Mesh().subgraphs("dp").run(junk, 2, [1, 2])),
        "run size": lambda junk: list(Mesh().subgraphs("dp").run(lambda part, x: x, junk, [1, 2])),
        "rpc": lambda junk: rpc(junk),
        "rpc(concurrent=)": lambda junk: rpc(concurrent=junk)(lambda self: 0),
        "rpc(main_thread=)": lambda junk: rpc(main_thread=junk)(lambda self: 0),
        "rpc(name)": lambda junk: rpc("name")(junk),
    }
    for name, call in calls.items():
        own = (TypeError,) if name in ("run", "run size") else ()  # of the function that is run
        for junk in JUNK:
            faults.attempt(f"{name} {junk!r:.40}", lambda: call(junk), own)  # noqa: B023
    for junk in JUNK:
        faults.attempt(f"group[{junk!r:.40}]", lambda: group[junk], SEQUENCE)  # noqa: B023
        faults.attempt(f"batch[{junk!r:.40}]", lambda: group.call_batch("g", 2, [1, 2])[junk], SEQUENCE)  # noqa: B023


def test_junk_for_options_is_refused_by_name(group: RoleGroup[Any], faults: Faults) -> None:
    for name in ("timeout_s", "idempotent", "queue", "window"):
        for junk in JUNK:
            told = f"{name}={junk!r:.40}"
            faults.attempt(told, lambda: group.options(**{name: junk}).call("f").result(HANG_S))  # noqa: B023
            faults.attempt(told, lambda: list(group.options(**{name: junk}).stream("s")))  # noqa: B023
            faults.attempt(told, lambda: group[0].options(**{name: junk}).call("f").result(HANG_S))  # noqa: B023


def test_junk_for_testing_tools_is_refused_by_name(faults: Faults) -> None:
    for junk in JUNK:
        for name in ("transport", "plan", "network", "key"):
            faults.attempt(f"InProcessCluster({name}={junk!r:.40})", lambda: _serve_one(**{name: junk}))  # noqa: B023
        for name in ("seed", "drop", "duplicate", "reorder", "delay_s", "half_open", "alter", "spare"):
            faults.attempt(f"FaultPlan({name}={junk!r:.40})", lambda: FaultPlan(**{name: junk}))  # noqa: B023
        for name in ("nodes", "devices_per_node", "view", "run_root", "limits", "nvml"):
            faults.attempt(f"LocalCluster({name}={junk!r:.40})", lambda: LocalCluster(**{name: junk}))  # noqa: B023


def test_junk_for_a_runtime_is_refused_by_name(faults: Faults) -> None:
    for junk in JUNK:
        for name in ("name", "key", "socket_dir", "bind", "public", "job_id", "node_rank", "network"):
            faults.attempt(f"Runtime.start({name}={junk!r:.40})", lambda: _start(**{name: junk}))  # noqa: B023


def _serve_one(**settings: Any) -> None:
    with InProcessCluster(**settings) as cluster:
        cluster.serve("W", Worker()).call("f").result(HANG_S)


def _start(**settings: Any) -> None:
    with Runtime.start(**settings) as runtime:
        runtime.serve("W:0", Worker())
