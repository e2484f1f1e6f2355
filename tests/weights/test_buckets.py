"""Buckets, joined ones and those of shards."""

from __future__ import annotations

import pickle
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rlmesh.weights.manifest import Manifest, TensorSpec
from rlmesh.weights.planning.buckets import ALIGNMENT, cut, join, parts_of, share_out

SPECS = Manifest(
    (TensorSpec("a", (10, 3), "float32"), TensorSpec("empty", (0, 3), "float32"), TensorSpec("b", (7,), "bfloat16"),
     TensorSpec("tie", (7,), "bfloat16", alias_of="b"), TensorSpec("c", (), "int64"))
)  # fmt: skip
TYPES = {spec.name: spec.dtype for spec in SPECS}


def held(cuts: list[int]) -> dict[str, dict[str, tuple[int, int]]]:
    """Ranks that hold runs of rows, which end at these rows."""
    ranks: dict[str, dict[str, tuple[int, int]]] = {}
    begin = dict.fromkeys(TYPES, 0)
    for rank, end in enumerate([*cuts, 99]):
        parts = {}
        for spec in SPECS:
            row = spec.numel // spec.shape[0] if spec.shape and spec.shape[0] else spec.numel
            stop = min(end * row, spec.numel)
            parts[spec.name] = begin[spec.name], max(stop - begin[spec.name], 0)
            begin[spec.name] = max(stop, begin[spec.name])
        ranks[f"A:{rank}"] = parts
    return ranks


@given(st.lists(st.integers(0, 12), max_size=4).map(sorted))
def test_every_byte_is_sent_once_whatever_the_shards(cuts: list[int]) -> None:
    buckets = cut(SPECS, TYPES, 64)
    shares = share_out(SPECS, held(cuts))
    assert shares is not None
    sent: dict[str, list[tuple[int, int]]] = {}
    for share in shares.values():
        for bucket in parts_of(buckets, share):
            ends = [0]
            for entry in bucket.entries:
                sent.setdefault(entry.name, []).append((entry.start, entry.start + entry.nbytes))
                assert entry.offset % ALIGNMENT == 0 and entry.offset >= ends[-1]
                ends.append(entry.offset + entry.nbytes)
            assert bucket.nbytes == ends[-1]
    for spec in SPECS:
        if spec.alias_of is None:
            runs = sorted(sent[spec.name])
            assert runs[0][0] == 0 and runs[-1][1] == spec.nbytes
            assert all(first[1] == second[0] for first, second in pairwise(runs))


def test_shards_that_do_not_add_up_are_not_used() -> None:
    gap = held([4, 6])
    del gap["A:1"]
    assert share_out(SPECS, gap) is None
    assert share_out(SPECS, {"A:0": None, "A:1": None}) is None
    twice = held([4])
    more = {**twice, "A:2": dict(twice["A:0"]), "A:3": dict(twice["A:1"])}
    shares = share_out(SPECS, more)
    assert shares is not None and not shares["A:2"] and not shares["A:3"], "replicas send nothing"


def test_buckets_are_joined_up_to_a_size() -> None:
    buckets = cut(SPECS, TYPES, 1)
    assert len(buckets) == 4 and all(bucket.count == 1 for bucket in buckets)
    (whole,) = join(buckets, 1 << 20, 1 << 20)
    assert (whole.index, whole.count) == (0, 4) and len(whole.entries) == 4
    places = [(entry.offset, entry.offset + entry.nbytes) for entry in whole.entries]
    assert all(a[1] <= b[0] and b[0] % ALIGNMENT == 0 for a, b in pairwise(places))
    assert join(buckets, 0, 0) == list(buckets) and join((), 10, 10) == []
    assert [(each.index, each.count) for each in join(buckets, 130, 130)] == [(0, 2), (2, 2)]
    assert [(each.index, each.count) for each in join(buckets, 0, 1 << 20)] == [(0, 1), (1, 3)]


def test_a_bucket_travels_as_it_is() -> None:
    share = share_out(SPECS, held([4]))
    assert share is not None
    for bucket in (*cut(SPECS, TYPES, 64), *parts_of(cut(SPECS, TYPES, 64), share["A:1"])):
        assert pickle.loads(pickle.dumps(bucket)) == bucket
