"""Slurm's compressed lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import UsageError
from rlmesh_launcher.hostlist import expand_counts, expand_nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("login", "login"),
        ("n[001-003,007],gpu-a[1-2]b", "n001 n002 n003 n007 gpu-a1b gpu-a2b"),
        ("rack[1-2]-n[01-02]", "rack1-n01 rack1-n02 rack2-n01 rack2-n02"),
        ("a[1-2][1-2]x[3]", "a11x3 a12x3 a21x3 a22x3"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1,1,01]", "n1 n1 n01"),
        ("b[2],a[1]", "b2 a1"),
        ("ip-10-0-[0-1]-7.eu.cloud", "ip-10-0-0-7.eu.cloud ip-10-0-1-7.eu.cloud"),
        ("[1-2]a", "1a 2a"),
    ],
)
def test_names_are_expanded_in_their_order(text: str, names: str) -> None:
    assert expand_nodes(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "why", "at"),
    [
        ("", "a name is missing", 1),
        ("a,,b", "a name is missing", 3),
        ("a,", "a name is missing", 3),
        ("n[1-3", "a bracket is not closed", 6),
        ("n1-3]", "closed that was not opened", 5),
        ("n[1,[2]]", "brackets do not nest", 5),
        ("n[]", "'' is neither a number nor a range", 2),
        ("n[1-]", "'1-' is neither", 2),
        ("n[a-c]", "'a-c' is neither", 2),
        ("n[3-1]", "runs backwards", 2),
        ("n[0-999999999]", "more than 100,000 names", 2),
        ("n[0-999][0-999]", "more than 100,000 names", 9),
        ("(null)", "'(' is in no name", 1),
        ("n1 n2", "' ' is in no name", 3),
    ],
)
def test_what_is_no_list_is_refused_where_it_ends_to_be_one(text: str, why: str, at: int) -> None:
    with pytest.raises(UsageError) as caught:
        expand_nodes(text)
    assert why in str(caught.value)
    assert f"at character {at})" in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["", "2(x)", "x2", "2(3)", "2,,1", "-1", "1(x200000)"])
def test_what_are_no_counts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a list that Slurm writes"):
        expand_counts(text)


def test_counts_are_expanded_in_their_order() -> None:
    assert expand_counts("24(x5),16") == (24, 24, 24, 24, 24, 16)


NAMES = st.from_regex(r"\A[a-z]{0,2}-?[0-9]{1,3}[a-z.]{0,2}\Z|\A[a-z-]{1,3}\Z")
RANGES = st.tuples(st.text("abn-", min_size=1, max_size=3), st.integers(0, 990), st.integers(0, 9), st.integers(1, 4))


@given(st.lists(NAMES, min_size=1, max_size=40))
def test_plain_names_stay_as_they_are(names: list[str]) -> None:
    assert expand_nodes(",".join(names)) == tuple(names)


@given(st.lists(RANGES, min_size=1, max_size=10))
def test_ranges_count_up_at_the_width_of_their_lower_end(ranges: list[tuple[str, int, int, int]]) -> None:
    text = ",".join(f"{name}[{low:0{width}d}-{low + more:0{width}d}]" for name, low, more, width in ranges)
    names = [
        f"{name}{number:0{max(width, len(str(low)))}d}"
        for name, low, more, width in ranges
        for number in range(low, low + more + 1)
    ]
    assert expand_nodes(text) == tuple(names)


@given(st.text("n[]0123-,a x", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand_nodes(text)
    except UsageError:
        return
    assert expand_nodes(",".join(names)) == names


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 5)), min_size=1, max_size=30))
def test_repeated_counts_are_repeated(counts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" for count, times in counts)
    assert expand_counts(text) == tuple(count for count, times in counts for _ in range(times))
