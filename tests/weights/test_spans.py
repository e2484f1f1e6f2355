"""Versions per token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.weights.version_spans import VersionSpans


@pytest.mark.case("O17")
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=20))
def test_spans_tell_the_version_of_every_token(parts: list[tuple[int, int]]) -> None:
    spans, wanted = VersionSpans(), list[int]()
    for version, tokens in parts:
        spans.add(version, tokens)
        wanted += [version] * tokens
    assert spans.per_token() == wanted and len(spans) == len(wanted)
    assert spans.policy_version == min(wanted, default=None)
    assert spans.staleness(7) == (7 - min(wanted) if wanted else 0)
    assert all(a[0] != b[0] and a[2] == b[1] for a, b in zip(spans.spans, spans.spans[1:], strict=False))
