"""Named axes: which ranks belong together, and the view of a group that follows from it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import UsageError
from rlmesh.runtime.axes import Axes
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress
from rlmesh.runtime.group import RoleGroup
from tests.runtime.conftest import Mesh

sizes = st.dictionaries(st.sampled_from(["dp", "pp", "tp", "cp"]), st.integers(1, 4), min_size=1)


@given(sizes)
def test_ranks_and_coordinates_are_inverse_and_the_last_axis_runs_fastest(mesh: dict[str, int]) -> None:
    axes = Axes.of(mesh)
    places = [dict(zip(mesh, place, strict=True)) for place in product(*map(range, mesh.values()))]
    assert [axes.rank(place) for place in places] == list(range(axes.size))
    assert [axes.coordinates(rank) for rank in range(axes.size)] == places


@given(sizes, st.data())
def test_going_along_an_axis_visits_each_of_its_coordinates_once(mesh: dict[str, int], data: st.DataObject) -> None:
    axes = Axes.of(mesh)
    name = data.draw(st.sampled_from(sorted(mesh)))
    at = {other: data.draw(st.integers(0, size - 1)) for other, size in mesh.items() if other != name}
    ranks = axes.along((name,), at)
    assert [axes.coordinates(rank) for rank in ranks] == [{**at, name: i} for i in range(mesh[name])]
    assert list(ranks) == sorted(ranks)
    assert axes.along(tuple(mesh), {}) == tuple(range(axes.size))


def test_wrong_axes_are_answered_with_the_right_ones() -> None:
    axes = Axes.of({"dp": 2, "tp": 4})
    assert axes.along(("dp",), {}) == (0, 4) and axes.along(("dp",), {"tp": 1}) == (1, 5)
    with pytest.raises(UsageError, match=r"no axis 'dpp' in dp=2 x tp=4; did you mean dp"):
        axes.along(("dpp",), {})
    with pytest.raises(UsageError, match="tp=4 is outside of"):
        axes.along(("dp",), {"tp": 4})
    with pytest.raises(UsageError, match="both an axis"):
        axes.along(("dp",), {"dp": 1})
    with pytest.raises(UsageError, match="name an axis"):
        axes.along((), {})
    with pytest.raises(UsageError, match="rank 8 is outside"):
        axes.coordinates(8)
    for wrong in ({}, {"dp": 0}, {"dp": True}):
        with pytest.raises(UsageError, match=r"mesh\("):
            Axes.of(wrong)


def test_a_view_along_an_axis_has_the_ranks_on_it(mesh: Mesh) -> None:
    members = tuple(MemberAddress("A", rank, 0, None) for rank in range(8))
    book = AddressBook(1, (*members, MemberAddress("B", 0, 0, None)), (("A", Axes.of({"dp": 2, "tp": 4})),))
    mesh.caller.set_address_book(book)
    group: RoleGroup[object] = RoleGroup("A", runtime=mesh.caller)
    mesh.wait_for_books(book)
    assert group.along("dp").ranks == (0, 4)
    assert group.along("tp", dp=1).ranks == (4, 5, 6, 7)
    assert group[:4].along("dp").ranks == (0,)
    assert len(group.along("dp", "tp")) == 8
    with pytest.raises(UsageError, match=r"B has no axes.*\.mesh\(dp=2, tp=4\)"):
        RoleGroup("B", runtime=mesh.caller).along("dp")
