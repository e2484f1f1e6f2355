"""Progress bars of members: live in the view, and their last state wherever a log is read."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlmesh.agent.monitoring import logs
from rlmesh.agent.monitoring.logs import LogLine, LogTail, last_lines
from rlmesh.agent.monitoring.progress_bars import compacted, is_bar, last_state
from rlmesh.job.status import MemberStatus
from rlmesh.observe.views.live import LiveView
from rlmesh.observe.views.plain import BARS_EVERY_S, PlainView
from rlmesh.run_directory.merged_logs import MergedLogs
from tests.observe.samples import STARTED_AT, Clock, member, status

pytestmark = pytest.mark.case("b16")


@pytest.mark.parametrize(("line", "shown"), [
    (b"plain", b"plain"),
    (b"ends with spaces  ", b"ends with spaces  "),
    (b"dos\r", b"dos"),
    (b"\r 10%\r 20%\r 30%", b" 30%"),
    (b"10%\r20%\r", b"20%"),
    (b"\r 99%\r       \rdone", b"done"),
    (b"\r 99%\r       \r", b""),
    (b"\r 99%\x1b[K\r\x1b[2K", b""),
    (b"\r 50%\x1b[A", b" 50%"),
    (b"\r\r\r", b""),
    (b"", b""),
])  # fmt: skip
def test_the_last_state_of_a_line_is_what_a_terminal_shows(line: bytes, shown: bytes) -> None:
    assert last_state(line) == shown


pieces = st.lists(st.sampled_from([b"\r", b"a", b"bc ", b" ", b"\x1b[K", b"7%"]), max_size=12).map(b"".join)


@given(pieces, pieces)
def test_a_compacted_line_goes_on_as_the_whole_would(before: bytes, after: bytes) -> None:
    assert last_state(compacted(before) + after) == last_state(before + after)
    assert is_bar(compacted(before)) or not is_bar(before)


def test_a_bar_is_live_and_then_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail()
    tail.add("A:0", path)
    with path.open("ab", buffering=0) as file:
        file.write(b"begin\n")
        assert (tail.poll(), tail.bars()) == ([LogLine("A:0", "begin")], [])
        for percent in range(0, 100, 10):
            file.write(b"\rshards: %2d%%" % percent)
            assert tail.poll() == []
            assert tail.bars() == [LogLine("A:0", f"shards: {percent:2d}%")]
        file.write(b"\rshards: 100%\ndone\n")
        assert tail.poll() == [LogLine("A:0", "shards: 100%"), LogLine("A:0", "done")]
        assert tail.bars() == []
        file.write(b"\rnext: 1%\r" + b" " * 10 + b"\r")
        assert tail.poll() == [] == tail.bars(), "a bar that was cleared"
    assert tail.finish() == []
    assert last_lines(path, 3)[:2] == ("shards: 100%", "done")


def test_a_bar_that_is_drawn_for_hours_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail()
    tail.add("A:0", path)
    for turn in range(20):
        with path.open("ab") as file:
            file.writelines(b"\rstep %07d of many" % (turn * 1000 + n) for n in range(1000))
        assert tail.poll() == []
    assert path.stat().st_size > 4 * logs.LINE_BYTES
    assert [bar.text for bar in tail.bars()] == ["step 0019999 of many"]
    assert last_lines(path) == ("step 0019999 of many",)
    assert tail.finish() == [LogLine("A:0", "step 0019999 of many")], "the member died"


def test_bars_below_each_other_are_no_lines(tmp_path: Path) -> None:
    """As tqdm draws them: one line down, the inner bar, one line up."""
    path = tmp_path / "log"
    tail = LogTail()
    tail.add("A:0", path)
    with path.open("ab", buffering=0) as file:
        file.write(b"\router 0%")
        seen = []
        for n in range(5):
            file.write(b"\n\rinner %d%%\x1b[A" % n)
            seen += [line.text for line in tail.poll()]
            assert [bar.text for bar in tail.bars()] == [f"inner {n}%"]
        file.write(b"\n\r         \x1b[A\router 100%\n")
        seen += [line.text for line in tail.finish()]
    assert seen == ["outer 0%", "outer 100%"]


@given(st.lists(st.sampled_from([b"\r", b"x1", b"y ", b"\n", b"\xc3", b"\xa4"]), max_size=30), st.integers(1, 7))
def test_however_a_bar_is_cut_the_same_lines_come_out(parts: list[bytes], size: int) -> None:
    whole = b"".join(parts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        tail = LogTail()
        tail.add("A:0", path)
        lines: list[LogLine] = []
        for at in range(0, len(whole), size):
            with path.open("ab") as file:
                file.write(whole[at : at + size])
            lines += tail.poll()
        lines += tail.finish()
        path.write_bytes(whole)
        at_once = LogTail()
        at_once.add("A:0", path)
        assert lines == at_once.finish()


class Shown:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "T-0.log"
        self.clock = Clock()
        self.out, self.err = io.StringIO(), io.StringIO()
        self.plain = PlainView(self.out, self.err, self.clock)
        self.live = LiveView(Console(file=io.StringIO(), width=60, height=40), self.clock)
        self.logs = [MergedLogs(view.output, view.ready, bars=view.bars) for view in (self.plain, self.live)]
        for logs_ in self.logs:
            logs_.follow([MemberStatus("T", 0, 0, 0, 1, "running", log_path=str(self.path))])

    def draw(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)
        for logs_ in self.logs:
            logs_.poll()

    def picture(self) -> str:
        console = Console(file=io.StringIO(), width=60, height=40)
        console.print(self.live.render(status(member("T", 0, "running"))))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert isinstance(text, str)
        return text


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


def test_the_live_view_shows_bars_as_they_are(shown: Shown) -> None:
    assert " | " not in shown.picture()
    for percent in (1, 50, 99):
        shown.draw(b"\rshards: %d%% " % percent + b"#" * 200)
        (line,) = [line for line in shown.picture().splitlines() if " | " in line]
        assert line.startswith(f"T:0 | shards: {percent}% ##") and len(line) <= 60
    shown.draw(b"\rshards: 100%\n")
    assert " | " not in shown.picture()


def test_the_plain_view_shows_a_bar_now_and_then(shown: Shown) -> None:
    for second in range(60):
        shown.clock.now = STARTED_AT + second
        for part in range(10):
            shown.draw(b"\rshards: %d.%d s" % (second, part))
    shown.draw(b"\rshards: 60 s\ndone\n")
    lines = shown.out.getvalue().splitlines()
    assert len(lines) == 59 // BARS_EVERY_S + 2
    assert lines[0] == "T:0 | shards: 10.0 s" and lines[-2:] == ["T:0 | shards: 60 s", "T:0 | done"]
    assert "\r" not in shown.out.getvalue()


def test_a_short_bar_is_one_line_in_the_plain_view(shown: Shown) -> None:
    for n in range(42):
        shown.clock.now += 0.05
        shown.draw(b"\r%d" % n)
    shown.draw(b"\n")
    assert shown.out.getvalue() == "T:0 | 41\n"


def test_of_many_bars_some_are_shown() -> None:
    clock, out = Clock(), io.StringIO()
    view = PlainView(out, io.StringIO(), clock)
    for _ in range(2):
        view.bars([f"A:{n} | {n}%" for n in range(100)])
        clock.now += BARS_EVERY_S
    assert out.getvalue().splitlines()[3:] == ["and 97 more progress bars"]
