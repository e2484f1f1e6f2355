"""Whatever weight sync is given, the answer is a committed push or an error of rlmesh's that says what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlmesh import ArraySink, ArraySource, ReceivesWeights, RoleGroup, SendsWeights, WeightSync
from rlmesh.errors import RLMeshError
from rlmesh.testing import InProcessCluster
from tests.own_time import HANG_S

JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 10**30, 1.5, float("nan"), "", "x", b"x", [], [1], (), {}, {"a": 1}, {"a": None},
    {"a": [1, 2]}, {"a": np.array(["x"], dtype=object)}, {"a": np.array(["xy"])}, {1: np.zeros(2)},
    {"a": np.array(["2020"], dtype="M8[D]")}, {"a": np.zeros(2, dtype=[("x", "f4")])},
    {"a": np.zeros(2, dtype=">f4")}, {"a": np.zeros(2, dtype="c16")}, {"a": np.float32(3)}, {"a": np.zeros((0, 3))},
    {"a": np.zeros(2, dtype="longdouble")}, set(), object(), int, lambda: 0, ...,
)  # fmt: skip
AT_ONCE_S = 4.0


class Sender(SendsWeights):
    def setup(self) -> None:
        self.send_weights(ArraySource(weights()))


class Taker(ReceivesWeights):
    def setup(self) -> None:
        self.receive_weights(ArraySink(weights()))


class Nothing:
    pass


def weights() -> dict[str, Any]:
    return {"a": np.arange(4, dtype=np.float32)}


def push(source: Any, sinks: Any, version: Any = 1, **settings: Any) -> None:
    with WeightSync(source, sinks, **{"connect_timeout_s": 2.0, **settings}) as sync:
        sync.push(version).result(HANG_S)


def test_wrong_use_is_told() -> None:
    found: list[str] = []

    def attempt(told: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            work()
        except RLMeshError as error:
            if not str(error).strip():
                found.append(f"{told}: {type(error).__name__} without a word")
        except Exception as error:
            found.append(f"{told}: {type(error).__name__}: {error}")
        if (took := time.monotonic() - began) > AT_ONCE_S:
            found.append(f"{told}: {took:.1f} s")

    with InProcessCluster() as cluster:
        sender, taker = cluster.add("SENDER", Sender), cluster.add("TAKER", Taker)
        nothing = cluster.add("NOTHING", Nothing)
        uses: dict[str, Callable[[Any], object]] = {
            "source": lambda junk: push(junk, taker),
            "sinks": lambda junk: push(sender, junk),
            "one of the sinks": lambda junk: push(sender, [junk]),
            "version": lambda junk: push(sender, taker, junk),
            "ArraySource": lambda junk: ArraySource(junk).manifest(),
            "ArraySink": lambda junk: ArraySink(junk).manifest(),
            "mode": lambda junk: ArraySink(weights(), junk),
            "send_weights": lambda junk: SendsWeights().send_weights(junk, name="SENDER:9"),
            "receive_weights": lambda junk: ReceivesWeights().receive_weights(junk, name="TAKER:9"),
            "arrays": lambda junk: push(ArraySource(junk), taker),
        }
        for setting in (
            "snapshot", "verify", "allow_cast", "channel", "bucket_bytes", "bucket_timeout_s", "flip_timeout_s",
            "timeout_s", "connect_timeout_s", "runtime",
        ):  # fmt: skip
            uses[setting] = lambda junk, setting=setting: push(sender, taker, **{setting: junk})  # type: ignore[misc]
        for name, use in uses.items():
            for junk in JUNK:
                attempt(f"{name}: {junk!r:.50}", lambda: use(junk))  # noqa: B023
        attempt("a sink without weights", lambda: push(sender, nothing))
        attempt("a source without weights", lambda: push(nothing, taker))
        attempt("no such role", lambda: push(RoleGroup("ABSENT"), taker))
        attempt("a role that only takes as the source", lambda: push(taker, taker))
        push(sender, taker, 5)  # after all of that
    assert not found, "\n".join(found)
