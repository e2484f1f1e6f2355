"""Any packet is either understood or a MalformedFrame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import MalformedFrame
from rlmesh.wire.envelope import Call, Cancel, Message, Reply, pack, unpack

_counts = st.integers(0, 2**40)
_headers = st.one_of(
    st.builds(
        Call, _counts, st.text(), st.integers(-1, 99), st.text(), st.floats(0, 1e6), st.integers(0, 3),
        st.lists(st.text(), max_size=3).map(tuple),
    ),
    st.builds(Reply, _counts, st.booleans(), _counts, _counts, _counts),
    st.builds(Cancel, _counts),
)  # fmt: skip
_messages = st.lists(st.tuples(_headers, st.lists(st.binary(max_size=30), max_size=3)), max_size=4)


@given(_messages)
def test_a_packet_comes_back_as_it_was(messages: list[Message]) -> None:
    assert unpack(pack(messages)) == messages


@given(_messages, st.data())
def test_a_truncated_or_altered_packet_is_understood_or_malformed(messages: list[Message], data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in pack(messages)]
    victim = data.draw(st.sampled_from(frames[:1]))
    if victim and data.draw(st.booleans()):
        victim[data.draw(st.integers(0, len(victim) - 1))] = data.draw(st.integers(0, 255))
    else:
        del victim[data.draw(st.integers(0, len(victim))) :]
    if data.draw(st.booleans()) and len(frames) > 1:
        frames.pop()
    try:
        found = unpack(frames)
    except MalformedFrame:
        return
    assert unpack(pack(found)) == found


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"\xc1"], [b"\x00"], [b"\x91\x91\x63"], [b"\x90", b"left over"]],
    ids=["nothing", "empty", "not msgpack", "a number", "unknown kind", "a frame too many"],
)
def test_what_is_no_packet_is_malformed(frames: list[bytes]) -> None:
    with pytest.raises(MalformedFrame):
        unpack(frames)
