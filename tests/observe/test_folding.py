from __future__ import annotations

import os
import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlmesh.observe.views.folding import Folding, ranks_text
from rlmesh.observe.views.text_output import FULL_BYTES, Lines


def test_the_same_line_of_many_is_one() -> None:
    folding = Folding(1.0)
    lines = [(f"ACTOR:{rank}", "loading") for rank in (0, 1, 2, 5)]
    assert folding.take(lines, 10.0) == ["ACTOR:0-2,5 | loading  (4 times)"]
    assert folding.take([("ACTOR:3", "loading"), ("CRITIC:0", "loading")], 10.5) == ["CRITIC:0 | loading"]
    assert folding.take([], 10.9) == []
    assert folding.take([], 11.0) == ["ACTOR:3 | loading"]
    assert folding.take([("ACTOR:4", "loading")], 11.5) == ["ACTOR:4 | loading"]
    assert folding.finish() == []


def test_a_traceback_keeps_all_its_lines() -> None:
    trace = ["Traceback", "  File a", "    return fn()", "  File b", "    return fn()", "ValueError"]
    folding = Folding()
    lines = [(f"A:{rank}", text) for rank in range(3) for text in trace]
    assert folding.take(lines, 0.0) == [f"A:0-2 | {text}  (3 times)" for text in trace]


def test_a_run_of_one_line_goes_on_over_polls() -> None:
    folding = Folding(1.0)
    assert folding.take([("A:0", "x")] * 400, 0.0) == ["A:0 | x  (400 times)"]
    assert folding.take([("A:0", "x")] * 600, 0.5) == []
    assert folding.finish() == ["A:0 | x  (600 times)"]


def test_ranks_are_short() -> None:
    assert ranks_text(["7", "0", "1", "2", "10"]) == "0-2,7,10"
    assert ranks_text(["3", "4"]) == "3-4"


streams = st.lists(
    st.lists(st.tuples(st.sampled_from(["A:0", "A:1", "B:0"]), st.sampled_from("abc")), max_size=12), max_size=6
)


@given(streams, st.sampled_from([0.2, 1.0]))
def test_no_line_is_lost_or_made_up(batches: list[list[tuple[str, str]]], window_s: float) -> None:
    folding = Folding(window_s)
    shown = [line for at, batch in enumerate(batches) for line in folding.take(batch, at * 0.3)] + folding.finish()
    said = Counter((name[0], text) for batch in batches for name, text in batch)
    told: Counter[tuple[str, str]] = Counter()
    for line in shown:
        found = re.fullmatch(r"(\w):[\d,-]+ \| (\w)(?:  \((\d+) times\))?", line)
        assert found, line
        told[found[1], found[2]] += int(found[3] or 1)
    assert told == said


def test_lines_never_wait_for_their_reader() -> None:
    read, write = os.pipe()
    with open(write, "w") as stream:
        lines = Lines(stream)
        number = 0
        while lines.ready():
            lines.write(f"line {number:05d} é")
            number += 1
        assert number * len("line 00000 é\n".encode()) > FULL_BYTES
        taken = b""
        while not lines.pump():
            taken += os.read(read, 1 << 16)
        assert lines.drain()
    taken += b"".join(iter(lambda: os.read(read, 1 << 16), b""))
    os.close(read)
    assert taken.decode().splitlines() == [f"line {n:05d} é" for n in range(number)]


def test_what_is_read_late_is_all_there() -> None:
    """One poll of many logs may bring more than there is room for; none of it is lost."""
    read, write = os.pipe()
    with open(write, "w") as stream:
        lines = Lines(stream)
        for number in range(200_000):
            lines.write(f"line {number:06d}")
        taken = b""
        while not lines.pump():
            taken += os.read(read, 1 << 16)
    taken += b"".join(iter(lambda: os.read(read, 1 << 16), b""))
    os.close(read)
    assert taken.decode().splitlines() == [f"line {number:06d}" for number in range(200_000)]


def test_a_line_is_written_whole_beside_those_of_others() -> None:
    """Standard error is often the same pipe."""
    read, write = os.pipe()
    with open(write, "w") as stream:
        lines = Lines(stream)
        for number in range(5000):
            lines.write(f"line {number:05d} {'x' * (number % 300)}")
        taken, others = b"", 0
        while not lines.pump():
            taken += os.read(read, 5000)
            os.write(write, b"another's\n")
            others += 1
    taken += b"".join(iter(lambda: os.read(read, 1 << 16), b""))
    os.close(read)
    seen = taken.decode().splitlines()
    assert seen.count("another's") == others > 10
    own = [line for line in seen if line != "another's"]
    assert own == [f"line {number:05d} {'x' * (number % 300)}" for number in range(5000)]


def test_a_reader_that_takes_nothing_is_given_up() -> None:
    read, write = os.pipe()
    with open(write, "w") as stream:
        lines = Lines(stream)
        while lines.ready():
            lines.write("x" * 1000)
        assert not lines.drain(0.05)
        lines.write("more")
        assert lines.drain(0.05)
    os.close(read)


def test_a_reader_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        lines = Lines(stream)
        lines.write("x")
        assert lines.drain()
