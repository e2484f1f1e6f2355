"""Handles, groups and slices as arguments and results; what they say of themselves."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from rlmesh.errors import UsageError
from rlmesh.runtime.default_runtime import set_default_runtime
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh

pytestmark = pytest.mark.case("s05")


@dataclass
class Holder:
    """Something of the user's own that has some among its attributes."""

    whom: list[Any]


class Member:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @rpc
    async def who(self) -> int:
        return self.rank


class Relay:
    @rpc
    def ask(self, whom: Any) -> Any:
        return whom.call("who").result(HANG_S)

    @rpc
    def ask_all(self, holder: Holder) -> Any:
        return [whom.call("who").result(HANG_S) for whom in holder.whom]

    @rpc
    def same(self, whom: Any) -> Any:
        return whom

    @rpc
    def found(self, role: str) -> Any:
        group = RoleGroup(role)
        return group[1], group[1:], group.options(timeout_s=7.5)


def test_handles_and_groups_arrive_and_call(mesh: Mesh) -> None:
    group = mesh.serve("A", *[Member(rank) for rank in range(4)])
    relay = mesh.serve("B", Relay())[0]
    assert relay.call("ask", group[2]).result(HANG_S) == 2
    assert relay.call("ask", group).result(HANG_S) == [0, 1, 2, 3]
    assert relay.call("ask", group[1:3]).result(HANG_S) == [1, 2]
    assert relay.call("ask_all", Holder([group[3], group[::2]])).result(HANG_S) == [3, [0, 2]]
    handle, rest, patient = relay.call("found", "A").result(HANG_S)
    assert (handle.role, handle.rank, handle.call("who").result(HANG_S)) == ("A", 1, 1)
    assert rest.ranks == (1, 2, 3) and rest.call("who").result(HANG_S) == [1, 2, 3]
    assert patient._options.timeout_s == 7.5 and len(patient) == 4
    assert [handle.name for handle in relay.call("same", list(group[:2])).result(HANG_S)] == ["A:0", "A:1"]


def test_a_handle_to_an_address_arrives_with_it(mesh: Mesh) -> None:
    mesh.serve("A", Member(5))
    relay = mesh.serve("B", Relay())[0]
    served = next(address for address in mesh.addresses if address.role == "A")
    assert served.endpoint is not None
    handle: MemberHandle[Any] = mesh.caller.peer("A:0", served.endpoint, incarnation=0)
    assert relay.call("ask", handle).result(HANG_S) == 5
    back = relay.call("same", handle).result(HANG_S)
    assert (back.name, back.endpoint, back.incarnation) == ("A:0", served.endpoint, 0)


def test_what_they_say_of_themselves(mesh: Mesh) -> None:
    group = mesh.serve("A", Member(0), Member(1))
    assert [(handle.role, handle.rank) for handle in group] == [("A", 0), ("A", 1)]
    master = mesh.caller.peer("@master", "unix:///nowhere")
    assert (master.role, master.rank) == ("@master", None)


def test_outside_of_a_job_they_say_what_is_missing(mesh: Mesh) -> None:
    group = mesh.serve("A", Member(0))
    handle, whole = pickle.loads(pickle.dumps((group[0], group)))
    set_default_runtime(None)
    try:
        for arrived in (handle, whole):
            with pytest.raises(UsageError, match="not part of a job"):
                arrived.call("who")
    finally:
        set_default_runtime(mesh.caller)
