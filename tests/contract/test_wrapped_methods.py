"""Methods under decorators, partials and objects: each runs, and is awaited, as what it is."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from rlmesh.agent.worker.fused import acting_for
from rlmesh.errors import CallCancelled, RemoteError, UsageError
from rlmesh.job.context import JobInfo, WorkerContext
from rlmesh.runtime.rpc import rpc
from rlmesh.runtime.serving.method_kinds import is_on_loop
from tests.own_time import HANG_S
from tests.runtime.conftest import Mesh


def traced(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def bare(name: str) -> Callable[[Any], Any]:
    """A decorator that hides what it decorates."""

    def decorate(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        wrapper.__name__ = name
        return wrapper

    return decorate


def blocking(function: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """A decorator that makes a plain method of a coroutine function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return wrapper


class Scorer:
    """An object in the place of a method."""

    async def __call__(self, x: int) -> int:
        await asyncio.sleep(0)
        return x + 1


class PlainScorer:
    def __call__(self, x: int) -> int:
        return x + 1


async def scaled(factor: int, x: int) -> int:
    await asyncio.sleep(0)
    return factor * x


class Engine:
    def __init__(self) -> None:
        self.running = self.most = 0
        self.closed = threading.Event()
        self.began = threading.Event()

    async def _count(self, x: int) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.005)
        self.running -= 1
        return x + 1

    @rpc
    @traced
    async def wrapped(self, x: int) -> int:
        return await self._count(x)

    @traced
    @rpc
    @traced
    async def twice(self, x: int) -> int:
        return await self._count(x)

    @rpc
    @bare("hidden")
    async def hidden(self, x: int) -> int:
        return await self._count(x)

    @rpc(concurrent=8)
    @traced
    async def many(self, x: int) -> int:
        return await self._count(x)

    @rpc(concurrent=4)
    @bare("many_hidden")
    async def many_hidden(self, x: int) -> int:
        return await self._count(x)

    @rpc
    @blocking
    async def runs_itself(self, x: int) -> int:
        return await self._count(x)

    @rpc
    @staticmethod
    @traced
    async def static(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    @classmethod
    @rpc
    @traced
    async def of_class(cls, x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    async def _add(self, y: int, x: int) -> int:
        await asyncio.sleep(0)
        return x + y

    partial_method = rpc("partial_method")(functools.partialmethod(_add, 1))  # type: ignore[type-var]
    partial = rpc("partial")(functools.partial(scaled, 1))
    scorer = rpc("scorer")(Scorer())
    plain_scorer = rpc("plain_scorer")(PlainScorer())

    @rpc
    def returns_a_task(self, x: int) -> Any:
        return Awaitable(x + 1)

    @rpc
    @bare("forever")
    async def forever(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    @rpc
    @bare("fails")
    async def fails(self) -> None:
        raise TimeoutError("mine")

    @rpc
    @traced
    async def items(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield i
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    @rpc
    @bare("hidden_items")
    async def hidden_items(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield i
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    @rpc
    @traced
    def plain_items(self, n: int) -> Iterator[int]:
        yield from range(n)

    @rpc
    async def gives_items(self, n: int) -> AsyncIterator[int]:
        return self.items(n)  # type: ignore[no-any-return]

    @rpc
    def most_at_once(self) -> int:
        most, self.most = self.most, 0
        return most


class Awaitable:
    def __init__(self, value: int) -> None:
        self.value = value

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.value


ONE_MORE = [
    "wrapped", "twice", "hidden", "many", "many_hidden", "runs_itself", "static", "of_class", "partial_method",
    "scorer", "plain_scorer", "returns_a_task",
]  # fmt: skip


@pytest.mark.case("b04")
@pytest.mark.parametrize("method", ONE_MORE)
def test_the_result_of_a_wrapped_method_is_awaited(mesh: Mesh, method: str) -> None:
    engine = mesh.serve("ENGINE", Engine())[0]
    futures = [engine.call(method, x) for x in range(6)]
    assert [future.result(HANG_S) for future in futures] == [1, 2, 3, 4, 5, 6]
    assert engine.call("partial", 5).result(HANG_S) == 5
    most = engine.call("most_at_once").result(HANG_S)
    bound = {"many": 8, "many_hidden": 4}.get(method, 1)
    assert most <= bound, "as many at a time as @rpc says"
    if method == "many":
        assert most > 1


@pytest.mark.case("b04")
@pytest.mark.parametrize("method", ["items", "hidden_items", "plain_items", "gives_items"])
def test_the_items_of_a_wrapped_generator_are_streamed(mesh: Mesh, method: str) -> None:
    object_ = Engine()
    engine = mesh.serve("ENGINE", object_)[0]
    assert list(engine.stream(method, 100)) == list(range(100))
    object_.closed.clear()
    with engine.stream(method, 10**6) as stream:
        assert next(stream) == 0
    if method != "plain_items":
        assert object_.closed.wait(HANG_S), "who stops early ends the generator"
    assert engine.call("plain_scorer", 1).result(HANG_S) == 2, "the member goes on"


@pytest.mark.case("b04")
def test_a_wrapped_method_is_cancelled_and_fails_as_an_async_one_does(mesh: Mesh) -> None:
    object_ = Engine()
    engine = mesh.serve("ENGINE", object_)[0]
    future = engine.call("forever")
    assert object_.began.wait(HANG_S)
    assert future.cancel() and object_.closed.wait(HANG_S)
    with pytest.raises(CallCancelled):
        future.result(HANG_S)
    with pytest.raises(TimeoutError, match="mine") as caught:
        engine.call("fails").result(HANG_S)
    assert isinstance(caught.value, RemoteError)
    assert engine.call("wrapped", 1).result(HANG_S) == 2


@pytest.mark.case("b04")
def test_torchs_decorators_leave_methods_what_they_are(mesh: Mesh) -> None:
    torch = pytest.importorskip("torch")

    class Model:
        @rpc
        @torch.no_grad()  # type: ignore[untyped-decorator]
        async def score(self, x: int) -> int:
            await asyncio.sleep(0)
            return x + 1

        @rpc
        @torch.inference_mode()  # type: ignore[untyped-decorator]
        async def items(self) -> AsyncIterator[int]:
            yield 1

    model = mesh.serve("MODEL", Model())[0]
    assert model.call("score", 1).result(HANG_S) == 2
    assert list(model.stream("items")) == [1]


@pytest.mark.case("b04")
def test_what_is_async_under_its_decorators() -> None:
    assert all(is_on_loop(getattr(Engine(), name)) for name in ("wrapped", "twice", "static", "of_class", "scorer"))
    assert all(is_on_loop(getattr(Engine(), name)) for name in ("partial", "partial_method", "items"))
    assert not any(is_on_loop(getattr(Engine(), name)) for name in ("runs_itself", "plain_items", "plain_scorer"))
    with pytest.raises(UsageError, match=r"main_thread=True\) is for def methods; wrapped"):
        rpc(main_thread=True)(traced(Engine.wrapped))
    with pytest.raises(UsageError, match=r'it has no name; give it one: @rpc\("name"\)'):
        rpc(functools.partial(scaled, 1))


@pytest.mark.case("b04")
@pytest.mark.parametrize("name", ["wrapped", "hidden", "items", "hidden_items"])
async def test_a_wrapped_method_works_in_a_process_of_several_roles(name: str) -> None:
    link: Any = None
    context = WorkerContext(JobInfo("job", "id", {}, "CPU"), "ENGINE", 0, 1, link)
    made = acting_for(context, getattr(Engine(), name))(3)
    found = [item async for item in made] if "items" in name else await made
    assert found == ([0, 1, 2] if "items" in name else 4)
