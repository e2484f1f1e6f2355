"""Keys: made once, kept from others, refused where others could have read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.errors import UsageError
from rlmesh.runtime.connections.security import (
    KEY_VARIABLE,
    CurveKeys,
    find_key,
    load_key_file,
    make_key,
    write_key_file,
)


def test_a_key_comes_back_from_its_file(tmp_path: Path) -> None:
    key = write_key_file(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert load_key_file(tmp_path / "key") == key and len(key) == 32
    assert make_key() != make_key()


def test_a_file_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    key = write_key_file(tmp_path / "key")
    with pytest.raises(UsageError, match="exists already and is not replaced"):
        write_key_file(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists already"):
        write_key_file(tmp_path / "link")
    assert load_key_file(tmp_path / "key") == key and not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="cannot be made: No such file"):
        write_key_file(tmp_path / "no" / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    write_key_file(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(UsageError, match=rf"has mode {mode:04o}.*chmod 600 .*rlmesh keygen"):
        load_key_file(tmp_path / "key")


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "a" * 63, "a" * 65, "é" * 32, "ab" * 32 + "\nmore"])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(UsageError, match=r"characters that are no key .*rlmesh keygen"):
        load_key_file(tmp_path / "key")


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, text in (("absent", "No such file"), (".", "no regular file"), ("pipe", "no regular file")):
        with pytest.raises(UsageError, match=rf"{text}.*rlmesh keygen"):
            load_key_file(tmp_path / name)


def test_the_key_is_found_by_argument_or_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=r"no key: pass --key-file FILE or set RLMESH_KEY_FILE.*rlmesh keygen"):
        find_key()
    one, two = write_key_file(tmp_path / "one"), write_key_file(tmp_path / "two")
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "one"))
    assert find_key() == one and find_key(tmp_path / "two") == two


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_each_key_has_its_own_curve_keys(first: bytes, second: bytes) -> None:
    one, other = CurveKeys(first), CurveKeys(second)
    assert one.listener == CurveKeys(first).listener and one.listener != one.caller
    assert (one.listener == other.listener) == (first == second)
    assert len({*one.listener, *one.caller}) == 4
