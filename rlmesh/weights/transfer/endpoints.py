"""The two ends of a `WeightSync` as it sees them: members of roles, or a source in its own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as PlainFuture
from typing import Any, Protocol

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.job.context import current_worker
from rlmesh.runtime.connections.address_book import member_name
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from rlmesh.weights.manifest import Manifest
from rlmesh.weights.members import commander, origin_of
from rlmesh.weights.planning.plan import DeviceLocation, Participant
from rlmesh.weights.planning.source_state import Left, Standing
from rlmesh.weights.protocols import WeightSource
from rlmesh.weights.transfer.sender import Sender
from rlmesh.wire.envelope import ANY_INCARNATION

Incarnations = Mapping[str, int]


def party_of(fields: Mapping[str, Any]) -> Participant:
    """From what a member said of itself."""
    node, shm, device, peers, ipc, why_not = fields["place"]
    manifest, parts = fields["manifest"], fields.get("parts")
    standing, left = fields.get("standing"), fields.get("left")
    return Participant(
        name=fields["name"],
        incarnation=fields["incarnation"],
        place=DeviceLocation(node, shm, device, tuple(peers), ipc, why_not),
        manifest=Manifest.from_wire(manifest) if manifest is not None else None,
        mode=fields["mode"],
        parts={name: (first, count) for name, (first, count) in parts.items()} if parts else None,
        takes_parts=fields.get("takes_parts", False),
        standing=Standing(*standing) if standing is not None else None,
        left=Left(*left) if left is not None else None,
    )


class Endpoint(Protocol):
    """Either end.

    Attributes:
        is_here: it is in this process, and has done what it is told when `call` returns.
    """

    is_here: bool

    def incarnations(self) -> Incarnations:
        """Who belongs to it now, and how often each was restarted."""
        ...

    def call(
        self, member: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> PlainFuture[Any]:
        """Call a method of a member: of this incarnation of it, and of no other, if one is given."""
        ...

    def close(self) -> None: ...


class Bound:
    """An end as it was when a link was made: what it is told is meant for those incarnations of its members."""

    def __init__(self, end: Endpoint, incarnations: Incarnations) -> None:
        self._end, self._incarnations = end, incarnations

    def call(self, member: str, method: str, *args: Any, timeout_s: float) -> PlainFuture[Any]:
        incarnation = self._incarnations.get(member, ANY_INCARNATION)
        return self._end.call(member, method, *args, timeout_s=timeout_s, incarnation=incarnation)


class MemberEndpoint:
    """All members of some roles."""

    is_here = False

    def __init__(self, groups: Sequence[RoleGroup[Any]], runtime: Runtime) -> None:
        self._groups, self._runtime = groups, runtime
        self._command = commander(runtime)

    def incarnations(self) -> Incarnations:
        book = self._runtime.address_book()
        found = {}
        for group in self._groups:
            for rank in group.ranks:
                member = book.find(group.role, rank)
                found[member_name(group.role, rank)] = member.incarnation if member is not None else -1
        return found

    def call(
        self, member: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> PlainFuture[Any]:
        return self._command(member, method, *args, timeout_s=timeout_s, incarnation=incarnation)

    def behind(self, version: int, timeout_s: float) -> frozenset[str]:
        """Sinks that serve another version, or none."""
        asked = {m: self.call(m, "weights_sink_describe", timeout_s=timeout_s) for m in self.incarnations()}
        return frozenset(member for member, answer in asked.items() if answer.result()["version"] != version)

    def rollback(self, flip_s: float, timeout_s: float) -> int:
        """Let all go back; the version that they serve then."""
        asked = {m: self.call(m, "weights_rollback", flip_s, timeout_s=timeout_s) for m in self.incarnations()}
        served: dict[str, int | None] = {}
        faults = []
        for member, answer in asked.items():
            try:
                served[member] = answer.result()
            except Exception as error:
                faults.append(f"{member}: {error}")
        versions = set(served.values())
        if faults or len(versions) != 1 or None in versions:
            now = ", ".join(f"{member} serves {version}" for member, version in served.items()) or "none did"
            raise WeightSyncError(f"not all sinks could go back: {'; '.join(faults)}. {now}. Push a version to all")
        return next(version for version in versions if version is not None)

    def close(self) -> None:
        return


class LocalSource:
    """A source in this process; its commands are plain calls, which end before they return."""

    is_here = True

    def __init__(self, source: WeightSource, runtime: Runtime) -> None:
        try:
            worker = current_worker()
            self.name, incarnation, node = worker.name, worker.incarnation, worker.node_name or None
        except UsageError:
            self.name, incarnation, node = f"process {os.getpid()}", 0, None
        self._sender = Sender(
            source, self.name, commander(runtime), origin_of(runtime), incarnation=incarnation, node=node
        )
        self._methods: dict[str, Callable[..., Any]] = {
            "weights_source_describe": self._sender.describe,
            "weights_source_has": self._sender.has,
            "weights_open": self._sender.open,
            "weights_connect": self._sender.connect,
            "weights_capture": self._sender.capture,
            "weights_sent": self._sender.sent,
            "weights_close": self._sender.close_session,
        }

    def incarnations(self) -> Incarnations:
        return {self.name: self._sender.incarnation}

    def call(
        self, member: str, method: str, *args: Any, timeout_s: float, incarnation: int = ANY_INCARNATION
    ) -> PlainFuture[Any]:
        future: PlainFuture[Any] = PlainFuture()
        try:
            result = self._methods[method](*args)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result.to_wire() if hasattr(result, "to_wire") else result)
        return future

    def close(self) -> None:
        self._sender.close()
