"""Every exception arrives: type, text, traceback, causes."""

from __future__ import annotations

import pickle
import threading

import pytest

from rlmesh.errors import CallTimeout, MethodNotFound, RemoteError
from rlmesh.wire import failure


class TwoArguments(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class HoldsALock(ValueError):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def arrive(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        record = pickle.loads(pickle.dumps(failure.record(raised)))
    return failure.rebuild(record, role="ACTOR", rank=2, method="step")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("r2"),
        KeyError("k"),
        FileNotFoundError(2, "no such file"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
        TwoArguments(3, "bad"),
        HoldsALock(),
        ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_caught_by_its_own_type(error: Exception) -> None:
    back = arrive(error)
    assert isinstance(back, type(error)) and isinstance(back, RemoteError)
    assert "ACTOR:2" in str(back) and type(error).__name__ in back.remote_type
    assert back.remote_message == str(error)
    assert "raise error" in back.remote_traceback and "test_failure.py" in back.remote_traceback
    assert (back.role, back.rank, back.method, back.executed) == ("ACTOR", 2, "step", "yes")
    assert str(pickle.loads(pickle.dumps(back))) == str(back)


def test_an_os_error_keeps_its_number() -> None:
    back = arrive(FileNotFoundError(2, "gone"))
    assert isinstance(back, FileNotFoundError) and back.errno == 2


def test_the_type_survives_two_hops() -> None:
    again = arrive(arrive(ValueError("deep")))
    assert isinstance(again, ValueError) and "deep" in str(again)


def test_a_local_class_arrives_as_a_remote_error_that_knows_its_name() -> None:
    class Local(Exception):
        pass

    back = arrive(Local("inside"))
    assert type(back) is RemoteError and back.remote_type.endswith("Local") and "inside" in str(back)


def test_text_that_raises_does_not_hide_the_error() -> None:
    back = arrive(BrokenText())
    assert isinstance(back, RemoteError)
    assert "BrokenText" in back.remote_type and "__str__ raised" in back.remote_message


def test_the_chain_of_causes_is_told() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as outer:
        record = failure.record(outer)
    back = failure.rebuild(record, role="A", rank=0, method="m")
    assert isinstance(back, RemoteError)
    assert back.remote_causes == ("KeyError: 'inner'",) and "KeyError" in back.remote_traceback


def test_errors_of_the_runtime_arrive_as_they_are() -> None:
    assert isinstance(arrive(MethodNotFound("no such method")), MethodNotFound)
    timeout = arrive(CallTimeout("late", role="CRITIC", rank=0, method="values", executed="maybe"))
    assert isinstance(timeout, CallTimeout) and timeout.role == "CRITIC"


def test_a_base_exception_arrives_as_an_ordinary_error() -> None:
    back = arrive(KeyboardInterrupt())
    assert isinstance(back, RemoteError) and back.remote_type == "KeyboardInterrupt"
