"""Exception classes of every make: the caller gets the class, what the object holds, the text and the traceback."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import importlib
import inspect
import pickle
import pkgutil
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from rlmesh.agent.protocol import portable_error
from rlmesh.errors import CallError, CallTimeout, RemoteError
from rlmesh.wire import failure
from rlmesh.wire.remote_type import CONTROL_FLOW


def arrive(error: BaseException, *, rank: int = 2) -> Any:
    """What the caller raises."""
    try:
        raise error
    except BaseException as raised:
        record = pickle.loads(pickle.dumps(failure.record(raised)))
    return failure.rebuild(record, role="ACTOR", rank=rank, method="step", call_id=9)


def told(error: Any, name: str, text: str) -> None:
    """At least type, text, traceback."""
    assert isinstance(error, RemoteError)
    details = CallError.details(error)
    assert details.remote_type.rpartition(".")[2] == name.rpartition(".")[2]
    assert text in details.remote_message and text in str(error) and "raised by ACTOR:2 in step()" in str(error)
    assert "test_remote_types.py" in details.remote_traceback and "raise error" in details.remote_traceback
    assert repr(error)
    assert any("raise error" in note for note in error.__notes__)


# b01: exceptions that steer the interpreter.


class Mine(StopIteration):
    pass


class MineToo(ValueError, KeyboardInterrupt):
    pass


@pytest.mark.case("b01")
@pytest.mark.parametrize("cls", [*CONTROL_FLOW, Mine, MineToo], ids=lambda cls: cls.__qualname__)
def test_control_flow_is_told_and_is_none_at_the_caller(cls: type[BaseException]) -> None:
    back = arrive(cls("over"))
    told(back, cls.__qualname__, "over")
    assert not isinstance(back, CONTROL_FLOW)
    assert isinstance(back, ValueError) == issubclass(cls, ValueError)
    again = arrive(back)
    assert not isinstance(again, CONTROL_FLOW) and CallError.details(again).remote_type == details_type(back)
    grouped = arrive(BaseExceptionGroup("several", [cls("over"), KeyError("k")]))
    told(grouped, type(BaseExceptionGroup("several", [cls("over"), KeyError("k")])).__name__, "several")
    assert isinstance(grouped, ExceptionGroup)
    inner, other = grouped.exceptions
    assert isinstance(inner, RemoteError) and not isinstance(inner, CONTROL_FLOW) and isinstance(other, KeyError)
    assert CallError.details(inner).remote_type == details_type(back)


def details_type(error: Any) -> str:
    return CallError.details(error).remote_type


def test_an_error_of_a_call_within_a_group_keeps_its_member() -> None:
    inner = arrive(ValueError("deep"), rank=7)
    late = CallTimeout("late", role="CRITIC", rank=3, method="values", executed="maybe")
    back = arrive(ExceptionGroup("several", [inner, late, OSError(2, "gone", "f")]))
    first, second, third = back.exceptions
    assert isinstance(first, ValueError) and CallError.details(first).rank == 7
    assert isinstance(second, CallTimeout) and (second.role, second.rank, second.executed) == ("CRITIC", 3, "maybe")
    assert isinstance(third, OSError) and (third.errno, third.filename) == (2, "f")
    try:
        raise back
    except* ValueError as matched:
        assert matched.exceptions == (first,)
    except* Exception:
        pass


# b02: attributes, and classes whose methods refuse, raise or lie.


class Limited(Exception):
    code = 429
    text: str

    def __init__(self, text: str, rank: int, host: str) -> None:
        super().__init__(text, rank, host)
        self.rank, self.host, self.text = rank, host, text


class ReadOnly(Exception):
    @property
    def rank(self) -> int:
        return int(self.args[1])

    @property
    def executed(self) -> str:
        return "mine"


class Slotted(Exception):
    __slots__ = ("never_set", "rank", "shard")

    def __init__(self, shard: int) -> None:
        self.shard, self.rank = shard, -1
        super().__init__("bad shard")


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


class Needs(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.code, self.why = code, why


class Doubles(Exception):
    """Made again from its arguments it would be another."""

    def __init__(self, what: str) -> None:
        super().__init__(f"no {what}")


class NewNeeds(Exception):
    def __new__(cls, a: int, b: int) -> NewNeeds:
        return super().__new__(cls, a)

    def __init__(self, a: int, b: int) -> None:
        super().__init__("of two")
        self.b = b


class Lies(Exception):
    def __reduce__(self) -> Any:
        return (KeyError, ("something else",))


class LiesMore(Exception):
    def __reduce__(self) -> Any:
        return (int, ("7",))


class RefusesToTravel(Exception):
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise KeyboardInterrupt


class RaisingProperty(Exception):
    @property
    def role(self) -> str:
        raise LookupError("no role")


class NoText(Exception):
    def __str__(self) -> str:
        raise StopIteration


class NoRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NumberAsText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Text(str):
    def __reduce__(self) -> NoReturn:
        raise RuntimeError("cannot travel")


class OddText(Exception):
    def __str__(self) -> str:
        return Text("odd")


class Holds(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())
        self.lock, self.shard = threading.Lock(), 5


class Methods(Exception):
    def details(self) -> str:
        return "mine"

    def role(self) -> str:
        return "a method"


class NoSubclasses(Exception):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("final")


@pytest.mark.case("b02")
@pytest.mark.parametrize(
    ("error", "text", "has"),
    [
        (Limited("slow down", 17, "api"), "slow down", {"code": 429, "rank": 17, "host": "api", "text": "slow down"}),
        (ReadOnly("bad", 23), "bad", {"rank": 23, "executed": "mine"}),
        (Slotted(4), "bad shard", {"shard": 4, "rank": -1}),
        (Frozen("cold"), "cold", {"args": ("cold",), "rank": 2}),
        (Needs(7, why="range"), "range (7)", {"code": 7, "why": "range", "args": ("range (7)",)}),
        (Doubles("room"), "no room", {"args": ("no room",)}),
        (NewNeeds(1, 2), "of two", {"b": 2, "args": ("of two",)}),
        (Lies("truth"), "truth", {"args": ("truth",)}),
        (LiesMore("truth"), "truth", {}),
        (RefusesToTravel("stays"), "stays", {"args": ("stays",)}),
        (RaisingProperty("plain"), "plain", {"rank": 2}),
        (NoText("seven", 7), "__str__ raised StopIteration; its arguments: 'seven', 7", {"args": ("seven", 7)}),
        (NoRepr("quiet"), "quiet", {}),
        (NumberAsText(), "__str__ raised TypeError", {}),
        (OddText(), "odd", {}),
        (Holds("locked"), "locked", {"shard": 5}),
        (Methods("named"), "named", {"rank": 2}),
        (SyntaxError("bad", ("f.py", 3, 5, "a b")), "bad", {"text": "a b", "lineno": 3, "filename": "f.py"}),
        (OSError(2, "gone", "a", None, "b"), "gone", {"errno": 2, "filename": "a", "filename2": "b"}),
        (ImportError("no", name="m", path="p"), "no", {"name": "m", "path": "p"}),
        (AttributeError("no", name="n", obj=3), "no", {"name": "n", "obj": 3}),
        (UnicodeDecodeError("utf8", b"x", 0, 1, "bad"), "bad", {"object": b"x", "reason": "bad", "end": 1}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_users_attributes_win_and_all_is_told(error: Exception, text: str, has: dict[str, Any]) -> None:
    cls = type(error)
    back, details = arrive(error), CallError.details(arrive(error))
    for hops in (1, 2):
        back = arrive(error if hops == 1 else arrive(error))
        assert isinstance(back, cls)
        told(back, cls.__qualname__, text)
        for name, value in has.items():
            assert getattr(back, name) == value, f"{name} after {hops} hops"
        details = CallError.details(back)
        where = (details.role, details.rank, details.method, details.call_id, details.executed)
        assert where == ("ACTOR", 2, "step", 9, "yes") and details.pid > 0 and details.host
    for twin in (pickle.loads(pickle.dumps(back)), copy.copy(back)):
        assert str(twin) == str(back) and type(twin) is type(back) and twin.args == back.args
        assert isinstance(twin, RemoteError) and CallError.details(twin) == details


@pytest.mark.case("b02")
@pytest.mark.parametrize("error", [NoText("seven"), NoRepr("quiet"), Lies("truth"), RefusesToTravel("stays")], ids=type)
def test_the_master_is_told_of_what_a_role_raises_itself(error: Exception) -> None:
    there = pickle.loads(pickle.dumps(portable_error(error)))
    assert type(there).__name__ == type(error).__name__
    assert failure.message_of(error) == str(there)


@pytest.mark.case("b02")
def test_a_class_that_nothing_derives_from_is_told() -> None:
    back = arrive(NoSubclasses("closed"))
    assert type(back) is RemoteError
    told(back, "NoSubclasses", "closed")


class OfACall(CallError):
    """A user's own error of a call."""

    @property
    def executed(self) -> Any:
        return "mine"

    @executed.setter
    def executed(self, value: object) -> None:
        pass


@pytest.mark.case("b02")
def test_a_users_call_error_has_the_traceback_too() -> None:
    back = arrive(OfACall("no answer", role="X"))
    assert isinstance(back, OfACall) and back.role == "X" and "raise error" in back.__notes__[0]


# The sweep.

STANDARD = """
abc argparse ast asyncio asyncio.exceptions asyncio.queues base64 binascii bdb bz2 calendar cmd codecs codeop
concurrent.futures concurrent.futures.process concurrent.futures.thread configparser contextlib copy csv ctypes
dataclasses datetime decimal difflib doctest email.errors enum faulthandler ftplib getopt getpass gzip html http.client
http.cookiejar http.cookies imaplib importlib.metadata importlib.resources inspect io ipaddress json json.decoder locale
logging lzma mailbox marshal mimetypes mmap multiprocessing multiprocessing.context multiprocessing.managers
multiprocessing.pool netrc nntplib ntpath optparse os pathlib pdb pickle pickletools pkgutil plistlib poplib
posixpath pstats pty py_compile pyclbr queue quopri random re reprlib runpy sched select shelve shlex shutil signal
smtplib socket socketserver sqlite3 ssl statistics string struct subprocess symtable sys tabnanny tarfile telnetlib
tempfile textwrap threading timeit token tokenize tomllib traceback tracemalloc types typing unicodedata unittest
unittest.case urllib.error urllib.parse urllib.request uuid venv warnings weakref webbrowser wsgiref.validate xdrlib
xml.dom xml.dom.minidom xml.etree.ElementTree xml.parsers.expat xml.sax xmlrpc.client zipfile zipimport zlib zoneinfo
""".split()  # noqa: SIM905
OTHERS = ["torch", "httpx", "pydantic", "pydantic_core", "msgpack", "zmq", "numpy"]


def modules_of(package: str) -> Iterator[Any]:
    if package == "the standard library":
        import builtins

        yield builtins
        for name in STANDARD:
            try:
                yield importlib.import_module(name)
            except ImportError:
                continue  # Other versions of Python have others.
        return
    root = pytest.importorskip(package)
    yield root
    if package == "torch":
        names = [
            "torch.cuda",
            "torch.distributed",
            "torch.nn",
            "torch.jit",
            "torch.onnx",
            "torch.fx",
            "torch.multiprocessing",
        ]
        names += ["torch.distributed.elastic.multiprocessing.errors", "torch.distributed.elastic.rendezvous.api"]
        names += ["torch._dynamo.exc", "torch.utils.data", "torch.export", "torch.distributed.checkpoint.api"]
    else:
        names = [
            info.name for info in pkgutil.iter_modules(root.__path__, f"{package}.") if "__main__" not in info.name
        ]
    for name in names:
        try:
            yield importlib.import_module(name)
        except Exception:
            continue


def made_of(cls: type[BaseException]) -> BaseException:
    """An instance, by whichever arguments the class takes."""
    tries: list[tuple[Any, ...]] = [("swept",), (), (1, "swept"), ("swept", 1), (1, "swept", 3), ("a", "b", "swept", 4)]
    tries += [("swept", []), ("swept", "b", {}), (b"x", "swept"), ("swept", [ValueError("one")])]
    tries += [("utf8", b"x", 0, 1, "swept"), ("utf8", "x", 0, 1, "swept"), ("u", 4, "swept", {}, None)]
    tries += [("greater_than", {"gt": 3}), ("custom", "swept", {})]
    for args in tries:
        try:
            return cls(*args)
        except Exception:
            continue
    error = cls.__new__(cls, "swept")
    required = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for parameter in required:
        error.__dict__[parameter.name] = "swept"
    return error


@pytest.mark.case("b02")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["the standard library", *OTHERS])
def test_every_exception_class_comes_back_as_itself(package: str) -> None:
    found: dict[type[BaseException], None] = {}
    for module in modules_of(package):
        for value in list(vars(module).values()):
            if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ != "rlmesh.errors":
                found[value] = None
    assert found, "a sweep that finds nothing shows nothing"
    rebuilt, wrong = 0, []
    for cls in found:
        try:
            error = made_of(cls)
        except Exception:
            continue  # An abstract one, or one that only its library can make.
        try:
            back = arrive(error)
            told(back, type(error).__qualname__, "")
            assert not isinstance(back, CONTROL_FLOW)
            rebuilt += isinstance(back, cls)
            if isinstance(back, cls) and not isinstance(error, BaseExceptionGroup):
                assert back.args == error.args or repr(back.args) == repr(error.args)
        except Exception as broken:
            wrong.append(f"{cls.__module__}.{cls.__qualname__}: {type(broken).__name__}: {broken}")
    assert not wrong, "\n".join(wrong)
    print(f"{package}: {len(found)} classes, {rebuilt} arrive as themselves")
    assert rebuilt >= len(found) * (0.2 if package == "pydantic_core" else 0.9)  # Final classes, there.


@pytest.mark.case("b02")
def test_objects_as_their_libraries_make_them() -> None:
    """Not by their constructors alone."""
    httpx = pytest.importorskip("httpx")
    pydantic = pytest.importorskip("pydantic")
    response = httpx.Response(503, request=httpx.Request("GET", "http://api.example/score"), text="busy")
    with pytest.raises(httpx.HTTPStatusError) as refused:
        response.raise_for_status()
    back = arrive(refused.value)
    assert isinstance(back, httpx.HTTPStatusError) and back.response.status_code == 503
    assert str(back.request.url) == "http://api.example/score"

    class Model(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        n: int

    with pytest.raises(pydantic.ValidationError) as invalid:
        Model(n="x")
    told(arrive(invalid.value), "ValidationError", "valid integer")


@pytest.mark.case("b01")
def test_a_cancellation_keeps_its_name() -> None:
    assert details_type(arrive(asyncio.CancelledError())) == "asyncio.exceptions.CancelledError"
    assert details_type(arrive(concurrent.futures.CancelledError())) == "concurrent.futures._base.CancelledError"
