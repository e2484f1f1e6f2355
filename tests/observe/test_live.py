from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rlmesh.job.status import ExitInfo, FailureInfo
from rlmesh.observe.views.live import LiveView, NoView, make_view
from rlmesh.observe.views.plain import PlainView
from tests.observe.samples import STARTED_AT, Clock, call, member, record, status


class Streams:
    def __init__(self) -> None:
        self.out, self.err, self.clock = io.StringIO(), io.StringIO(), Clock()
        self.view = PlainView(self.out, self.err, self.clock)

    def lines(self) -> list[str]:
        return self.err.getvalue().splitlines()


@pytest.fixture
def plain() -> Streams:
    return Streams()


def test_state_changes_share_a_line_and_come_once(plain: Streams) -> None:
    snapshot = status(member("ACTOR", 0, "starting"), member("ROLLOUT", 0, "ready"))
    plain.view.update(snapshot)
    plain.view.update(snapshot)
    assert plain.lines() == [
        "     0.0 s  demo started, run directory runs/demo-1",
        "     0.0 s  ACTOR 1 starting · ROLLOUT 1 ready",
    ]


def test_a_thousand_steps_in_ten_seconds_are_a_handful_of_lines(plain: Streams) -> None:
    for step in range(1000):
        plain.clock.now = STARTED_AT + step / 100
        reports = (record(step, reward_mean=step / 1000, step_time_s=0.01),)
        plain.view.update(status(records=reports, records_from=step))
    steps = [line for line in plain.lines() if "step " in line]
    assert 5 <= len(steps) <= 6
    assert steps[1] == "     2.0 s  step 200  reward_mean 0.2  step_time_s 0.01"


def test_slow_steps_have_one_line_each_and_the_last_is_always_shown(plain: Streams) -> None:
    for step in range(3):
        plain.clock.now += 10
        plain.view.update(status(records=(record(step, kl=0.5),), records_from=step))
        plain.view.update(status(records_from=step + 1))
    plain.clock.now += 0.1
    plain.view.finish(status(stage="succeeded", records=(record(3, kl=0.25),), records_from=3), None)
    assert [line.split("  ")[-2] for line in plain.lines() if "step " in line and "kl" in line] == [
        "step 0", "step 1", "step 2", "step 3"
    ]  # fmt: skip


def test_a_flood_of_state_changes_is_throttled(plain: Streams) -> None:
    for i in range(100):
        plain.clock.now = STARTED_AT + i / 50
        ready = [member("ROLLOUT", rank, "ready" if rank < i else "starting") for rank in range(100)]
        plain.view.update(status(*ready))
    assert len([line for line in plain.lines() if "ROLLOUT" in line]) <= 5


def test_worker_lines_go_to_out_as_they_are(plain: Streams) -> None:
    plain.view.output("GREETER:1 | hello")
    assert plain.out.getvalue() == "GREETER:1 | hello\n" and plain.lines() == []


def test_the_end_says_how_where_and_what_it_cost(plain: Streams) -> None:
    reports = [record(s, call("ROLLOUT", "generate"), reward_mean=0.1 * s, step_time_s=0.5) for s in range(1, 10)]
    plain.clock.now += 42
    end = status(
        member("TRAINER", 0, "exited"), stage="succeeded", records=tuple(reports), first_serving_s=0.75,
        all_serving_s=3.5,
    )  # fmt: skip
    plain.view.finish(end, Path("runs/demo-1/report.png"))
    text = plain.err.getvalue()
    assert "demo succeeded after 42.0 s at step 9" in text
    assert "first member serving after 0.75 s, all 1 after 3.50 s" in text
    assert "reward_mean 0.1 → 0.9" in text
    assert "of which rlmesh itself 6.0 ms (1.2 %)" in text
    assert text.endswith("run directory: runs/demo-1\nreport: runs/demo-1/report.png\n")


def test_a_failure_is_told_once_and_again_as_the_first_cause(plain: Streams) -> None:
    exit_info = ExitInfo("ACTOR", 1, 0, 4001, None, 9, STARTED_AT + 3)
    failure = FailureInfo("ACTOR:1: killed by SIGKILL (pid 4001)\nlast lines:\n  x", "ACTOR", 1, 0, exit_info)
    plain.view.update(status(failures=(failure,)))
    plain.view.update(status(failures=(failure,)))
    plain.view.finish(status(stage="failed", failures=(failure,)), None)
    told = [line for line in plain.lines() if "SIGKILL" in line]
    assert told == [
        "     0.0 s  failed: ACTOR:1: killed by SIGKILL (pid 4001)",
        "first cause: ACTOR:1: killed by SIGKILL (pid 4001)",
    ]


def test_a_reader_that_went_away_stops_nothing() -> None:
    tried: list[str] = []

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise BrokenPipeError

    view = PlainView(Broken(), Broken(), Clock())
    view.update(status(member("ACTOR", 0, "ready")))
    view.output("ACTOR:0 | text")
    view.finish(status(stage="succeeded"), None)
    assert any("ACTOR:0 | text" in text for text in tried)


def test_text_that_the_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    view = PlainView(io.TextIOWrapper(raw, encoding="ascii"), io.StringIO(), Clock())
    view.output("ACTOR:0 | grüße")
    assert raw.getvalue() == b"ACTOR:0 | gr\\xfc\\xdfe\n"


def test_auto_is_plain_without_a_terminal_and_live_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_view("auto", out=io.StringIO(), err=Terminal()), PlainView)
    assert isinstance(make_view("auto", out=Terminal(), err=Terminal()), LiveView)
    assert isinstance(make_view("none"), NoView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view("auto", out=Terminal(), err=Terminal()), PlainView)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)


def _console(height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=height, color_system=None)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_the_table_has_every_member_with_pid_state_step_and_beat() -> None:
    console, clock = _console(), Clock()
    view = LiveView(console, clock)
    clock.now += 65.5
    reports = tuple(record(step, reward_mean=step / 10, total_steps=40) for step in range(8))
    view.update(
        status(
            member("TRAINER", 0, "running", pid=4242, step=7, last_beat_at=clock.now - 1.5),
            member("ACTOR", 1, "ready", pid=4343),
            records=reports,
        )
    )
    view.close()
    text = _text(console)
    assert re.search(r"demo  running  01:05\.5  step 7/40", text)
    assert re.search(r"TRAINER:0 +4242 +running +7 +1\.5 s", text)
    assert re.search(r"ACTOR:1 +4343 +ready", text)
    assert re.search(r"reward_mean +0\.7 +▁▂▃▄▅▆▇█", text)


def test_a_job_larger_than_the_terminal_shows_what_is_wrong_first() -> None:
    console = _console(height=20)
    view = LiveView(console, Clock())
    members = [member("ROLLOUT", rank, "failed" if rank == 63 else "ready") for rank in range(64)]
    view.update(status(*members))
    view.close()
    text = _text(console)
    assert "ROLLOUT:63" in text and "and 57 more members" in text


def test_worker_output_keeps_its_words_whatever_is_in_them() -> None:
    console = _console()
    view = LiveView(console, Clock())
    view.update(status(member("ACTOR", 0, "ready")))
    view.output("ACTOR:0 | [bold]not markup[/bold] | \x1b[31mred\x1b[0m " + "x" * 150)
    view.finish(status(member("ACTOR", 0, "exited"), stage="succeeded"), None)
    text = _text(console)
    assert "ACTOR:0 | [bold]not markup[/bold] | red " + "x" * 150 in text
    assert "demo succeeded after 0.0 s" in text


def test_the_cursor_comes_back() -> None:
    console = _console()
    view = LiveView(console, Clock())
    view.update(status(member("ACTOR", 0, "ready")))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("\x1b[?25l") == 1
    view.close()
    view.close()
    assert console.file.getvalue().count("\x1b[?25h") == 1


@pytest.mark.case("a15")
def test_escapes_of_others_are_shown_and_not_obeyed(plain: Streams) -> None:
    evil = "\x1b]0;owned\x07\x1b[2Jred\r\u202eevil\ud83d"
    said = r"\x1b]0;owned\x07\x1b[2Jred\r\u202eevil\ud83d"
    plain.view.output(f"ACTOR:0 | {evil}")
    plain.view.update(replace(status(member("ACTOR", 0, "ready")), note=evil, failures=(FailureInfo(f"died: {evil}"),)))
    assert plain.out.getvalue() == f"ACTOR:0 | {said}\n"
    assert said in plain.err.getvalue() and "\x1b" not in plain.err.getvalue()

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200, color_system="standard")
    live = LiveView(console, Clock())
    live.output("ACTOR:0 | \x1b[31mred\x1b[0m \x1b[8mhidden\x1b[0m \x1b]0;owned\x07\x1b[2J")
    written = stream.getvalue()
    assert "\x1b[31mred" in written, "colours stay"
    assert r"\x1b[8mhidden" in written and r"\x1b]0;owned\x07\x1b[2J" in written
    assert "\x1b]0" not in written and "\x1b[2J" not in written and "\x1b[8m" not in written
