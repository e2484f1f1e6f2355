from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.agent.monitoring import logs
from rlmesh.agent.monitoring.logs import LogLine, LogTail, last_lines, member_log, written_before
from rlmesh.agent.monitoring.progress_bars import last_state
from rlmesh.agent.worker.worker_process import print_error


def test_last_lines_keep_a_half_line_and_replace_what_is_no_utf8(tmp_path: Path) -> None:
    path = member_log(tmp_path, "ACTOR", 3)
    path.parent.mkdir()
    path.write_bytes(b"one\ntwo\r\n\xff\xfethree\nhal")
    assert path.name == "ACTOR-3.log"
    assert last_lines(path) == ("one", "two", "\ufffd\ufffdthree", "hal")
    assert last_lines(path, 2) == ("\ufffd\ufffdthree", "hal")


def test_last_lines_read_only_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%07d\n" % n for n in range(100_000)))
    lines = last_lines(path, 100_000)
    assert lines[-1] == "0099999"
    assert set(map(len, lines)) == {7}
    assert len(lines) <= logs.LAST_BYTES // 8
    assert last_lines(tmp_path / "none") == ()


def test_tail_gives_complete_lines_of_each_member_once(tmp_path: Path) -> None:
    tail = LogTail()
    one, two = tmp_path / "1", tmp_path / "2"
    tail.add("A:0", one)
    tail.add("B:0", two)
    assert tail.poll() == []
    one.write_bytes(b"a\nb")
    two.write_bytes(b"x\n")
    assert tail.poll() == [LogLine("A:0", "a"), LogLine("B:0", "x")]
    with one.open("ab") as file:
        file.write(b"c\nlast")
    tail.add("A:0", one)
    assert tail.poll(["A:0", "C:9"]) == [LogLine("A:0", "bc")]
    assert tail.finish() == [LogLine("A:0", "last")]
    assert tail.finish() == []


def test_what_earlier_starts_have_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    old, replaced, new = (tmp_path / "logs" / f"A-{rank}.log" for rank in range(3))
    old.write_text("of before\nof befo")
    replaced.write_text("of before")
    tail = LogTail()
    tail.skip(written_before(tmp_path))
    for number, path in enumerate((old, replaced, new)):
        tail.add(f"A:{number}", path)
    with old.open("a") as file:
        file.write("re\nof now\n")
    replaced.rename(tmp_path / "logs" / "away.log")
    replaced.write_text("of now\n")
    new.write_text("of now\n")
    assert [line.text for line in tail.poll()] == ["re", "of now", "of now", "of now"]
    assert not tail.behind()


def test_tail_is_bounded_and_starts_again_with_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail()
    tail.add("A:0", path)
    path.write_bytes(b"x" * (logs.POLL_BYTES + 10) + b"\n")
    assert sum(len(line.text) for line in tail.poll()) <= logs.POLL_BYTES
    assert sum(len(line.text) for line in tail.finish()) <= logs.POLL_BYTES + 10
    path.unlink()
    path.write_bytes(b"new\n")
    assert tail.poll() == [LogLine("A:0", "new")]


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_however_it_is_cut_the_same_lines_come_out(chunks: list[bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        tail = LogTail()
        tail.add("A:0", path)
        lines = []
        for chunk in chunks:
            with path.open("ab") as file:
                file.write(chunk)
            lines += tail.poll()
        lines += tail.finish()
        whole = b"".join(chunks)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [line.text for line in lines] == [last_state(line).decode("utf-8", "replace") for line in expected]


def test_an_error_is_printed_to_a_log_on_a_full_disk_without_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", full)
        print_error("TRAINER:0: run() failed")
    with pytest.raises(OSError, match="No space left"):  # The text was written: it is in the file's buffer.
        full.close()
    print_error("TRAINER:0: run() failed")
    assert capsys.readouterr().err == "TRAINER:0: run() failed\n"
