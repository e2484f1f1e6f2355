"""First causes: twenty pairs of failures, related and unrelated, as the graph of calls and the clock have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlmesh.agent.protocol import origin_of
from rlmesh.errors import CallTimeout, GroupCallError, JobFailed, PeerLost, RemoteError
from rlmesh.job.restarts import Scope
from rlmesh.job.status import EdgeStats, FailureInfo, RestartRecord
from rlmesh.master.decisions.root_cause import Failures, RankedFailure, Weight, first_causes
from rlmesh.master.monitoring.graph import CallGraph
from rlmesh.observe.files.incidents import incident_files, read_incident
from rlmesh.testing import LocalCluster
from tests.master import cause_job


def graph_of(*calls: str, groups: tuple[str, ...] = (), devices: tuple[tuple[str, ...], ...] = ()) -> CallGraph:
    """``"T:0>W:0"`` per edge."""
    graph = CallGraph()
    names = {name for edge in calls for name in edge.split(">")} | {n for device in devices for n in device}
    for name in sorted(names):
        role, _, rank = name.partition(":")
        graph.add_member(role, int(rank))
    for edge in calls:
        caller, callee = edge.split(">")
        graph.observe(caller, [EdgeStats(callee, "f", 1, 0, 0, 0, 0, 0, 0)], 0.0)
    for role in groups:
        graph.declare_group(role)
    for device in devices:
        graph.declare_collocation(device)
    return graph


def info(name: str, at: float) -> FailureInfo:
    role, _, rank = name.partition(":")
    return FailureInfo(f"{name} failed", role, int(rank), at)


def death(name: str, at: float) -> RankedFailure:
    return RankedFailure(Weight.DEATH, info(name, at))


def own(name: str, at: float) -> RankedFailure:
    return RankedFailure(Weight.OWN, info(name, at))


def follows(name: str, at: float, *blames: str, lost: bool = True) -> RankedFailure:
    return RankedFailure(Weight.FOLLOWS, info(name, at), blames, lost)


def restart(unit: str, name: str, at: float, ready_at: float | None, scope: Scope = "member") -> RestartRecord:
    return RestartRecord(unit, scope, info(name, at), at, 0.0, ready_at)


@dataclass
class Pair:
    """``causes``: who is told, first cause first."""

    what: str
    graph: CallGraph
    failures: list[RankedFailure]
    causes: str
    restarts: list[RestartRecord] = field(default_factory=list)


TWO = graph_of("T:0>W:0", "T:0>V:0")
CHAIN = graph_of("T:0>A:0", "A:0>B:0", "X:0>Y:0")
PAIRS = [
    Pair("a death and the call that it broke", TWO, [follows("T:0", 10.1, "V:0"), death("V:0", 10.0)], "V:0 T:0"),
    Pair("the news of the death comes later", TWO, [follows("T:0", 10.0, "V:0"), death("V:0", 10.2)], "V:0 T:0"),
    Pair("a death two calls away", CHAIN, [follows("T:0", 10.0, "A:0"), death("B:0", 10.1)], "B:0 T:0"),
    Pair("an error of a member that calls nobody, and a death", CHAIN, [own("Y:0", 10.0), death("B:0", 10.1)],
         "Y:0 B:0"),
    Pair("an error, and the later death of a member that it called", CHAIN, [own("T:0", 10.0), death("B:0", 10.1)],
         "B:0 T:0"),
    Pair("an error, and the earlier death of a stranger", CHAIN, [death("Y:0", 9.9), own("T:0", 10.0)], "Y:0 T:0"),
    Pair("ranks of one group", graph_of("T:0>A:0", "T:0>A:1", groups=("A",)), [own("A:0", 10.0), death("A:1", 10.1)],
         "A:1 A:0"),
    Pair("ranks of a role that is no group", graph_of("T:0>A:0", "T:0>A:1"), [own("A:0", 10.0), death("A:1", 10.1)],
         "A:0 A:1"),
    Pair("on one device", graph_of("T:0>A:0", devices=(("A:0", "R:0"),)), [own("A:0", 10.0), death("R:0", 10.1)],
         "R:0 A:0"),
    Pair("an exception that names somebody else", TWO, [follows("T:0", 10.0, "V:0"), own("W:0", 9.9)], "W:0 T:0"),
    Pair("a caller whose calls nobody knows", CallGraph(), [follows("T:0", 10.0), death("V:0", 10.2)], "V:0 T:0"),
    Pair("a mended restart of somebody else", TWO, [follows("T:0", 10.0, "V:0")], "V:0 T:0",
         [restart("W:0", "W:0", 5.0, 5.4), restart("V:0", "V:0", 9.9, None)]),
    Pair("a restart of somebody else under way", TWO, [follows("T:0", 10.0, "V:0")], "V:0 T:0",
         [restart("W:0", "W:0", 9.8, None), restart("V:0", "V:0", 9.9, None)]),
    Pair("a mended restart of a member that the exception does not say was lost", TWO,
         [follows("T:0", 30.0, "W:0", lost=False)], "T:0", [restart("W:0", "W:0", 5.0, 5.4)]),
    Pair("an exception that was kept for ten seconds", TWO, [follows("T:0", 20.0, "V:0")], "V:0 T:0",
         [restart("V:0", "V:0", 9.9, 10.3)]),
    Pair("two losses of one member: the last one", TWO, [follows("T:0", 30.0, "V:0")], "V:0 T:0",
         [restart("V:0", "V:0", 5.0, 5.4), restart("V:0", "V:0", 20.0, 20.4)]),
    Pair("a restart behind the member that was called", CHAIN, [follows("T:0", 10.0, "A:0")], "B:0 T:0",
         [restart("B:0", "B:0", 9.0, 9.5)]),
    Pair("a restart of a role took the called rank along", TWO, [follows("T:0", 10.0, "W:0")], "W:3 T:0",
         [restart("W", "W:3", 9.9, None, "role")]),
    Pair("a restart of the job", CHAIN, [follows("T:0", 10.0, "A:0")], "Y:0 T:0",
         [restart("job", "Y:0", 9.9, None, "job")]),
    Pair("an error of the member's own after a restart", TWO, [own("T:0", 10.0)], "T:0",
         [restart("W:0", "W:0", 5.0, 5.4)]),
    Pair("a restart after the failure", TWO, [follows("T:0", 10.0, "V:0")], "T:0", [restart("V:0", "V:0", 10.5, None)]),
]  # fmt: skip


@pytest.mark.case("n03")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.what)
@pytest.mark.parametrize("turned", [False, True], ids=["", "told the other way round"])
def test_causes_are_connected_by_calls_and_by_time(pair: Pair, turned: bool) -> None:
    failures = pair.failures[::-1] if turned else pair.failures
    causes = first_causes(failures, pair.graph, pair.restarts)
    assert [f"{cause.role}:{cause.rank}" for cause in causes] == pair.causes.split()


def test_a_death_ends_the_wait_only_for_those_that_it_explains() -> None:
    failures = Failures()
    failures.add(follows("T:0", 10.0, "V:0"), 10.3)
    failures.add(death("Z:0", 10.05), 10.35)
    assert not failures.settled(10.1, TWO), "the death of V:0 may be on its way"
    failures.add(death("V:0", 10.0), 10.4)
    assert failures.settled(10.1, TWO)
    assert first_causes(failures.found, TWO)[0].role == "V"


@pytest.mark.case("n03")
def test_an_exception_tells_whose_calls_it_came_from() -> None:
    lost = PeerLost("V:0 is gone", role="V", rank=0)
    failed = RemoteError("W:1 raised", role="W", rank=1)
    wrapped = ValueError("no batch")
    wrapped.__cause__ = lost
    assert origin_of(lost) == (True, ("V:0",), True)
    assert origin_of(failed) == (True, ("W:1",), False)
    assert origin_of(wrapped) == (True, ("V:0",), True)
    assert origin_of(ValueError("own")) == (False, (), False)
    assert origin_of(CallTimeout("the master is slow", role="@master")) == (True, (), False)
    assert origin_of(GroupCallError("two", [failed, lost])).lost
    try:
        try:
            raise lost
        except PeerLost:
            raise KeyError("step") from None
    except KeyError as error:
        assert origin_of(error) == (False, (), False), "the author says that it is no consequence"


@pytest.mark.case("n03")
@pytest.mark.parametrize(("how", "first"), [("own", "TRAINER:0"), ("lost", "V:0")])
def test_a_mended_death_of_somebody_else_is_no_first_cause(how: str, first: str, tmp_path: Path) -> None:
    with LocalCluster(run_root=tmp_path), pytest.raises(JobFailed) as caught:
        cause_job.build(how).submit("cause")
    assert f"failed: {first} (pid" in str(caught.value).splitlines()[0]
    assert str(caught.value.exceptions[0]).startswith(f"{first} (pid")
    assert not any(str(error).startswith("W:0") for error in caught.value.exceptions)
    content = read_incident(incident_files(Path(caught.value.run_dir))[-1])
    assert content["first_cause"]["message"].startswith(first)
    (earlier,) = content["earlier"]
    assert "s before: W:0 (pid" in earlier and "served again after" in earlier
