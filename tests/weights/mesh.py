"""A source and sinks in one process, each with a runtime of its own: real sockets, real shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress, member_name
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.members import ReceivesWeights, SendsWeights
from rlmesh.weights.sync import WeightSync
from tests.own_time import HANG_S
from tests.settling import settle

KEY = b"0123456789abcdef0123456789abcdef"


class Sink(ReceivesWeights):
    """A member that receives, and nothing else."""


class Source(SendsWeights):
    """A member that sends, and nothing else."""


class WeightMesh:
    """Members of this process; ``restart`` gives one a new incarnation."""

    def __init__(self, socket_dir: Path) -> None:
        self._socket_dir = socket_dir
        self._runtimes: dict[str, Runtime] = {}
        self._addresses: dict[str, MemberAddress] = {}
        self._version = 0
        self.caller = self._start("caller")
        self.sinks: dict[str, Sink] = {}
        self.sources: dict[str, Source] = {}
        self.syncs: list[WeightSync] = []

    def _start(self, name: str) -> Runtime:
        runtime = Runtime.start(name=name, key=KEY, socket_dir=self._socket_dir)
        self._runtimes[name] = runtime
        return runtime

    def _serve(self, role: str, rank: int, member: object, incarnation: int) -> None:
        name = member_name(role, rank)
        runtime = self._runtimes[name]
        runtime.serve(name, member, incarnation=incarnation)
        self._publish(MemberAddress(role, rank, incarnation, runtime.endpoint))

    def _publish(self, address: MemberAddress) -> None:
        self._addresses[address.name] = address
        self._version += 1
        book = AddressBook(self._version, tuple(self._addresses.values()))
        for each in self._runtimes.values():
            each.set_address_book(book)
        settle(*self._runtimes.values())

    def runtime(self, member: str) -> Runtime:
        return self._runtimes[member]

    def add_sink(
        self, weights: Any, rank: int, *, tap: Any = None, incarnation: int = 0, node: str | None = None
    ) -> Sink:
        name = member_name("ROLLOUT", rank)
        self._start(name)
        sink = self.sinks[name] = Sink()
        sink.receive_weights(weights, name=name, incarnation=incarnation, node=node, tap=tap)
        self._serve("ROLLOUT", rank, sink, incarnation)
        return sink

    def add_source(
        self, weights: Any, rank: int = 0, *, node: str | None = None, incarnation: int = 0, restored: int | None = None
    ) -> Source:
        name = member_name("ACTOR", rank)
        runtime = self._start(name)
        source = self.sources[name] = Source()
        source.send_weights(weights, name=name, node=node, runtime=runtime, incarnation=incarnation, restored=restored)
        self._serve("ACTOR", rank, source, incarnation)
        return source

    def restart_source(self, weights: Any, rank: int = 0, *, restored: int | None = None) -> Source:
        name = member_name("ACTOR", rank)
        incarnation = self._addresses[name].incarnation + 1
        self.sources.pop(name).close_weights_source()
        self._runtimes.pop(name).close()
        return self.add_source(weights, rank, incarnation=incarnation, restored=restored)

    def change_source(self, weights: Any, rank: int = 0, *, restored: int | None = None) -> None:
        """The same process offers other weights."""
        name = member_name("ACTOR", rank)
        self.sources[name].send_weights(
            weights, name=name, runtime=self._runtimes[name], restored=restored,
            incarnation=self._addresses[name].incarnation,
        )  # fmt: skip

    def stop_sink(self, rank: int) -> None:
        name = member_name("ROLLOUT", rank)
        self.sinks.pop(name).close_weights()
        self._runtimes.pop(name).close()

    def announce_restart(self, rank: int) -> None:
        """The master's news that a sink is being restarted: it has no address before it serves again."""
        before = self._addresses[member_name("ROLLOUT", rank)]
        self._publish(MemberAddress("ROLLOUT", rank, before.incarnation + 1, None))

    def restart_sink(self, weights: Any, rank: int, *, tap: Any = None) -> Sink:
        incarnation = self._addresses[member_name("ROLLOUT", rank)].incarnation + 1
        self.stop_sink(rank)
        return self.add_sink(weights, rank, tap=tap, incarnation=incarnation)

    def sync(self, source: Any = None, **options: Any) -> WeightSync:
        """From all sources (or an object of this process) to all sinks."""
        sinks: RoleGroup[Any] = RoleGroup("ROLLOUT", runtime=self.caller)
        if source is None:
            source = RoleGroup("ACTOR", runtime=self.caller)
        made = WeightSync(source, sinks, **options)
        self.syncs.append(made)
        return made

    def close(self) -> None:
        for sync in self.syncs:
            sync.close()
        for sink in self.sinks.values():
            sink.close_weights()
        for source in self.sources.values():
            source.close_weights_source()
        for runtime in self._runtimes.values():
            runtime.close()
        # Whoever still holds the mesh shall not hold the weights.
        self.sinks.clear()
        self.sources.clear()
        self._runtimes.clear()


def until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.002)


def arrays(seed: int, sizes: Sequence[int] = (7, 1000, 0, 65536, 3)) -> dict[str, Any]:
    """Float arrays of odd sizes, two-dimensional where that goes."""
    generator = np.random.default_rng(seed)
    return {
        f"layer.{i}": generator.standard_normal((2, n // 2) if n % 2 == 0 else (n,)).astype(np.float32)
        for i, n in enumerate(sizes)
    }


def segments() -> list[str]:
    """Names of this process's segments of weights in shared memory."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"rlmesh-*-weights-*-{os.getpid()}-*"))
