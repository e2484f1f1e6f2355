"""Slurm's compressed lists, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import UsageError
from rlmesh_launcher.hostlist import compress_counts, compress_nodes, expand_counts, expand_nodes


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


@pytest.mark.parametrize("text", ["n[1-3],n5", "n[001-003,007]", "a,b,c7", "n[9-11]", "n[1,1-2]", "x1y[2-3]z"])
def test_what_compress_writes_it_writes_again(text: str) -> None:
    once = compress_nodes(expand_nodes(text))
    assert compress_nodes(expand_nodes(once)) == once
    assert len(once) <= len(text)


def test_lists_are_compressed() -> None:
    assert compress_nodes(["n001", "n002", "n003", "n007", "gpu-a1b", "gpu-a2b"]) == "n[001-003,007],gpu-a[1-2]b"
    assert compress_nodes(["n9", "n10", "n010", "login"]) == "n[9-10,010],login"
    assert compress_nodes([]) == ""
    assert compress_counts([24] * 5 + [16]) == "24(x5),16"


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a[1]", "(null)"])
def test_no_name_is_invented(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        compress_nodes([name])


@pytest.mark.parametrize("text", ["", "2(x)", "x2", "2(3)", "2,,1", "-1", "1(x200000)"])
def test_what_are_no_counts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no list that Slurm writes"):
        expand_counts(text)


NAMES = st.lists(st.from_regex(r"\A[a-z]{0,2}-?[0-9]{1,3}[a-z.]{0,2}\Z|\A[a-z-]{1,3}\Z"), min_size=1, max_size=40)


@given(NAMES)
def test_expand_is_the_inverse_of_compress(names: list[str]) -> None:
    assert expand_nodes(compress_nodes(names)) == tuple(names)


@given(st.text("n[]0123-,a x", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand_nodes(text)
    except UsageError:
        return
    assert expand_nodes(compress_nodes(names)) == names


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_counts_are_the_same_after_compression(counts: list[int]) -> None:
    assert expand_counts(compress_counts(counts)) == tuple(counts)
