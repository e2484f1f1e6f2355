"""A cluster within one process: what a user's own tests would do with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlmesh import RoleGroup, rpc
from rlmesh.errors import PeerLost, RoleNotFound, UsageError
from rlmesh.runtime.runtime import default_runtime_or_none
from rlmesh.testing import FaultPlan, InProcessCluster, VirtualLoop


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
            cluster.caller.default_timeout_s = 4000
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
            pending.result(5)
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
