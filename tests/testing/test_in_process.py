"""A cluster within one process: what a user's own tests would do with it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rlmesh import BaseWorkload, RoleGroup, Runtime, current_worker, rpc
from rlmesh.errors import PeerLost, RoleNotFound, UsageError
from rlmesh.runtime.default_runtime import default_runtime_or_none
from rlmesh.testing import FaultPlan, InProcessCluster, VirtualLoop
from tests.own_time import HANG_S


class Scorer:
    @rpc
    async def score(self, text: str, pause_s: float = 0.0) -> int:
        await asyncio.sleep(pause_s)
        return len(text)

    @rpc
    def words(self, text: str) -> list[str]:
        return text.split()


def total(texts: list[str]) -> int:
    """Code under test: it calls a role by its name, as in a job."""
    group = RoleGroup[Scorer]("SCORER")
    return sum(group.call_any(Scorer.score, text).result() for text in texts)


async def total_async(texts: list[str]) -> int:
    group = RoleGroup[Scorer]("SCORER")
    return sum([await group.call_any(Scorer.score, text, 3600.0) for text in texts])


def test_code_finds_the_roles_of_the_cluster_by_name() -> None:
    assert default_runtime_or_none() is None
    with InProcessCluster() as cluster:
        cluster.serve("SCORER", Scorer(), Scorer())
        assert total(["a", "bc", "def"]) == 6
        directory = cluster.socket_dir
    assert default_runtime_or_none() is None and not Path(directory).exists()


def test_hours_pass_in_virtual_time() -> None:
    async def main() -> int:
        async with InProcessCluster(plan=FaultPlan(delay_s=(0.0, 60.0))) as cluster:
            cluster.serve("SCORER", Scorer())
            cluster.caller.outbound.default_timeout_s = 4000
            return await total_async(["a", "bc"])

    with VirtualLoop() as loop:
        began = loop.time()
        assert loop.run(main()) == 3
        assert 7200 <= loop.time() - began < 7500


def test_a_killed_member_is_gone_and_the_others_stay() -> None:
    with InProcessCluster("unix") as cluster:
        group = cluster.serve("SCORER", Scorer(), Scorer())
        pending = group[0].call(Scorer.score, "a", 60.0)
        assert group[0].call(Scorer.words, "a b").result() == ["a", "b"]
        cluster.kill("SCORER", 0)
        with pytest.raises(PeerLost, match=r"SCORER rank 0 .* killed by SIGKILL"):
            pending.result(HANG_S)
        assert group[1].call(Scorer.score, "ab").result() == 2
        with pytest.raises(RoleNotFound, match="serves no SCORER:0"):
            cluster.kill("SCORER", 0)


def test_an_unknown_transport_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="one of loop, unix, ipc, tcp"):
        InProcessCluster("udp")  # type: ignore[arg-type]


def test_what_goes_wrong_inside_is_raised_and_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), InProcessCluster() as cluster:
        cluster.serve("SCORER", Scorer())[0].call(Scorer.score, "a", 60.0)
        raise ZeroDivisionError
    with pytest.raises(UsageError, match=r"mesh\("), InProcessCluster() as cluster:
        cluster.serve("SCORER", Scorer(), axes={"dp": 0})


class Member(BaseWorkload):
    """One that asks who it is, at every turn of its life."""

    def __init__(self) -> None:
        self.told = [self.name]

    def setup(self) -> None:
        self.told.append(f"setup of {self.name} of {self.world_size}, {self.config['lr']}")

    @rpc
    def who(self) -> list[str]:
        return [*self.told, current_worker().name]

    @rpc
    async def who_async(self) -> str:
        return current_worker().name

    def teardown(self) -> None:
        ended.append(self.name)


class Leader:
    def run(self) -> None:
        for step in range(3):
            names = [told[-1] for told in RoleGroup("MEMBER").call("who").result()]
            current_worker().report(step=step, members=len(names))
            assert current_worker().step_boundary(step) is None


ended: list[str] = []


def test_members_are_built_and_act_as_in_a_job() -> None:
    ended.clear()
    with InProcessCluster(config={"lr": 3}) as cluster:
        group = cluster.add("MEMBER", Member, total=2, groups={"a": 1, "b": 1})
        assert group.call("who").result() == [
            [f"MEMBER:{rank}", f"setup of MEMBER:{rank} of 2, 3", f"MEMBER:{rank}"] for rank in (0, 1)
        ]
        assert group.call("who_async").result() == ["MEMBER:0", "MEMBER:1"]
        assert len(RoleGroup("MEMBER/b")) == 1
        leader = cluster.run("LEADER", Leader)
        assert isinstance(leader, Leader)
        assert [(report.role, report.step, report.metrics) for report in cluster.reports] == [
            ("LEADER", step, {"members": 2.0}) for step in range(3)
        ]
        with pytest.raises(UsageError, match="has a MEMBER:0 already"):
            cluster.add("MEMBER", Member)
        with pytest.raises(UsageError, match="groups have 3 members in all, and it has 1"):
            cluster.add("OTHER", Member, groups={"a": 3})
        cluster.kill("MEMBER", 1)
        with pytest.raises(UsageError, match="not a worker"):
            current_worker()
    assert ended == ["MEMBER:0"]


class Late:
    async def setup(self) -> None: ...

    async def run(self) -> None: ...


class Later:
    async def run(self) -> None: ...


def test_hooks_that_nobody_would_await_are_told() -> None:
    with InProcessCluster() as cluster:
        with pytest.raises(UsageError, match=r"Late\.setup\(\) is async def"):
            cluster.add("LATE", Late)
        with pytest.raises(UsageError, match=r"Later\.run\(\) is async def"):
            cluster.run("LATER", Later)


async def test_a_run_would_stop_the_loop_it_needs() -> None:
    async with InProcessCluster() as cluster:
        with pytest.raises(UsageError, match="would block the loop"):
            cluster.run("LEADER", Leader)


def test_a_cluster_that_cannot_be_opened_leaves_nothing() -> None:
    with pytest.raises(UsageError, match="a job's key is 32 random bytes"):
        InProcessCluster(key=b"short")


def test_a_closed_runtime_starts_nothing_for_what_comes_late() -> None:
    runtime = Runtime.start(name="LATE:0")
    runtime.close()
    runtime.post_to_user(lambda: pytest.fail("it ran"))
    assert [thread.name for thread in threading.enumerate() if "LATE" in thread.name] == []
