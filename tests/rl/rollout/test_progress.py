"""`progress_of`: members say whether they sample, also while they are busy with a request."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from rlmesh import rpc
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.roles.sampling import SamplingRole
from rlmesh.rl.rollout.role_engines import progress_of
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress, member_name
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from tests.own_time import HANG_S
from tests.settling import settle

KEY = b"0123456789abcdef0123456789abcdef"


class Samples(SamplingRole):
    """A member whose request lasts until it is told otherwise."""

    def __init__(self) -> None:
        self.begun, self.ends = threading.Event(), threading.Event()

    @rpc
    def wait_for_end(self) -> bool:
        self.begun.set()
        return self.ends.wait(HANG_S)


class Other:
    """A member that cannot say it."""


def test_a_busy_member_says_that_it_samples_on() -> None:
    members: list[Any] = [Samples(), Other()]
    with tempfile.TemporaryDirectory(prefix="rlm-") as folder:
        started = [Runtime.start(name=name, key=KEY, socket_dir=Path(folder)) for name in ("caller", "one", "two")]
        try:
            caller, *own = started
            for rank, (runtime, member) in enumerate(zip(own, members, strict=True)):
                runtime.serve(member_name("ROLLOUT", rank), member, incarnation=0)
            book = tuple(MemberAddress("ROLLOUT", rank, 0, runtime.endpoint) for rank, runtime in enumerate(own))
            for runtime in started:
                runtime.set_address_book(AddressBook(1, book))
            settle(*started)
            group: RoleGroup[Any] = RoleGroup("ROLLOUT", runtime=caller)
            answer = group[0].call("wait_for_end")
            assert members[0].begun.wait(HANG_S)
            before = progress_of(group)
            assert list(before) == [0]
            assert progress_of(group) == before
            Growing([1], SamplingParams(4)).add([5, 6], [-1.0, -1.0], 1)
            assert progress_of(group)[0] - before[0] == 2
            members[0].ends.set()
            assert answer.result() is True
        finally:
            members[0].ends.set()
            for runtime in started:
                runtime.close()
