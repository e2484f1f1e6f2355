"""How passed values are named in a call: split and join are inverse, and what is altered is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import MalformedFrame
from rlmesh.wire.envelope import Frames
from rlmesh.wire.passed import RemoteRef, Value, pack_passed, unpack_passed

frames = st.lists(st.binary(max_size=8), min_size=1, max_size=3)
numbers = st.integers(-1, 2**40)
elsewhere = st.builds(RemoteRef, st.text(max_size=8), st.text(max_size=8), *[numbers] * 5)


@given(frames, st.lists(frames | elsewhere, max_size=4))
def test_what_is_packed_comes_back(arguments: Frames, values: list[Value]) -> None:
    assert unpack_passed(pack_passed(arguments, values)) == (arguments, values)


@given(frames, st.lists(frames | elsewhere, max_size=3), st.data())
def test_what_is_truncated_or_altered_is_refused_or_still_well_formed(
    arguments: Frames, values: list[Value], data: st.DataObject
) -> None:
    packed = pack_passed(arguments, values)
    broken = list(packed)
    if data.draw(st.booleans()):
        del broken[data.draw(st.integers(0, len(packed) - 1)) :]
    else:
        last = bytearray(packed[-1])
        last[data.draw(st.integers(0, len(last) - 1))] ^= data.draw(st.integers(1, 255))
        broken[-1] = bytes(last)
    try:
        found = unpack_passed(broken)
    except MalformedFrame:
        return
    assert unpack_passed(pack_passed(*found)) == found


@pytest.mark.parametrize("payload", [[], [b""], [b"x", b"\x01"], [b"x", b"\x92\x01\x01"]])
def test_garbage_is_refused(payload: Frames) -> None:
    with pytest.raises(MalformedFrame):
        unpack_passed(payload)
