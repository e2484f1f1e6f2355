"""Options of calls to groups, and keywords of a method that have their names."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from rlmesh import GroupOutcomes, RoleGroup
from rlmesh.errors import GroupCallError, UsageError
from rlmesh.runtime.rpc import has_parameter, rpc
from tests.runtime.conftest import Mesh


class Member:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @rpc
    def fails_on(self, *ranks: int) -> int:
        if self.rank in ranks:
            raise ValueError(f"rank {self.rank}")
        return self.rank

    @rpc
    def tag(self, x: Any) -> str:
        return f"{self.rank}:{x}"

    @rpc
    def keeps(self, x: Any, return_exceptions: Any = None, _scatter: Any = None) -> tuple[Any, Any, Any]:
        return x, return_exceptions, _scatter

    @rpc("renamed")
    async def keeps_async(self, *, return_exceptions: bool = False) -> bool:
        return return_exceptions

    @rpc
    def any_keyword(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs


@pytest.fixture
def group(mesh: Mesh) -> RoleGroup[Any]:
    return mesh.serve("M", *[Member(rank) for rank in range(5)])


def test_failures_are_keyed_by_rank(group: RoleGroup[Any]) -> None:
    for members, failed, rest in (
        (group[1:4], [1, 3], {2: 2}),
        (group[3:], [3], {4: 4}),
        (group, [1, 3], {0: 0, 2: 2, 4: 4}),
    ):
        outcomes = members.options(return_exceptions=True).call(Member.fails_on, 1, 3).result()
        assert outcomes.ranks == members.ranks
        for copy in (outcomes, pickle.loads(pickle.dumps(outcomes))):
            with pytest.raises(GroupCallError, match=f"{len(failed)} of {len(members)} members failed") as caught:
                copy.raise_all()
            assert list(caught.value.failures) == failed
            assert [str(error).splitlines()[0] for error in caught.value.failures.values()] == [
                str(outcomes[members.ranks.index(rank)]).splitlines()[0] for rank in failed
            ]
            assert caught.value.results == rest
    nobody = group[:0].options(return_exceptions=True).call("fails_on").result()
    assert nobody == [] and nobody.ranks == ()
    nobody.raise_all()


def test_a_view_with_options_is_a_group(group: RoleGroup[Any]) -> None:
    scattering = group.options(scatter=True)
    assert scattering.call(Member.tag, [5, 6, 7, 8, 9]).result() == ["0:5", "1:6", "2:7", "3:8", "4:9"]
    assert scattering[3:].call("tag", ("a", "b")).result() == ["3:a", "4:b"]
    assert scattering.options(scatter=False).call("tag", 5).result()[0] == "0:5"
    both = group[:2].options(scatter=True, return_exceptions=True).call(Member.fails_on, [1, 1]).result()
    assert both[0] == 0 and isinstance(both[1], ValueError)
    assert pickle.loads(pickle.dumps(scattering))._options.scatter


def test_an_option_that_would_be_ignored_is_an_error(group: RoleGroup[Any]) -> None:
    scattering, collecting = group.options(scatter=True), group.options(return_exceptions=True)
    forms: tuple[Callable[[RoleGroup[Any]], object], ...] = (
        lambda view: view.call_rank0("tag", 1), lambda view: view.call_any("tag", 1), lambda view: view[0], list,
        lambda view: view.call_batch("tag", [1]), lambda view: view.stream("tag"), lambda view: view.notify("tag", 1),
    )  # fmt: skip
    for form in forms:
        for view in (scattering, collecting):
            with pytest.raises(UsageError, match=r"options\((scatter|return_exceptions)=True\) is for call\(\)"):
                form(view)
    with pytest.raises(UsageError, match=r"options\(scatter=True\) is for call\(\) to a group, not for call_shards"):
        scattering.call_shards("tag", [1])


def test_keywords_of_the_method_go_to_the_method(group: RoleGroup[Any]) -> None:
    member = group[:1]
    assert member.call(Member.keeps, [1], return_exceptions=True, _scatter=True).result() == [([1], True, True)]
    assert member.call(Member.keeps, 1, return_exceptions="text").result() == [(1, "text", None)]
    assert member.call(Member(0).keeps_async, return_exceptions=True).result() == [True]
    collected = member.options(return_exceptions=True, scatter=True).call(Member.keeps, [1], return_exceptions=2)
    assert collected.result() == [(1, 2, None)]
    for form in (member.call_rank0, member.call_any, member[0].call):
        assert form("keeps", 1, return_exceptions=2, _scatter=3).result() == (1, 2, 3)
    assert member.call_shards("keeps", [1], return_exceptions=2, _scatter=3).result() == [([1], 2, 3)]


def test_the_keywords_of_a_call_are_still_accepted(group: RoleGroup[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert group[:2].call("tag", [5, 6], _scatter=True).result() == ["0:5", "1:6"]
        assert group[:2].call(Member.tag, [5, 6], _scatter=True).result() == ["0:5", "1:6"]
        outcomes = group.call(Member.fails_on, 1, return_exceptions=True).result()
        assert isinstance(outcomes[1], ValueError) and outcomes.ranks == (0, 1, 2, 3, 4)


def test_a_keyword_that_the_method_may_have_is_told(group: RoleGroup[Any]) -> None:
    for method in ("fails_on", "keeps", Member.any_keyword):
        with pytest.warns(FutureWarning, match=r"as an option of the call.*options\(return_exceptions=True\)") as told:
            outcomes = group.call(method, return_exceptions=True).result()
        assert isinstance(outcomes, GroupOutcomes)
        assert told[0].filename == __file__


def test_parameters_of_methods_are_known() -> None:
    assert has_parameter(Member.keeps, "return_exceptions") is True
    assert has_parameter(Member(0).keeps_async, "return_exceptions") is True
    assert has_parameter(staticmethod(lambda x: x), "x") is True
    assert has_parameter(Member.tag, "return_exceptions") is False
    assert has_parameter(Member.any_keyword, "return_exceptions") is None
    assert has_parameter("keeps", "return_exceptions") is None
