"""Sub-graph scheduling: a batch goes through several roles along one axis, each part at its own pace.

A step that runs as a whole waits after each role for the slowest member: a straggler in the first role stalls all
members of the second. Along ``dp``, the members of every role at ``dp=0`` make one sub-graph, the members at ``dp=1``
the next; only roles without that axis are shared. Each sub-graph takes its share of the batch through all roles, and
does not wait for the others::

    mesh = Mesh()

    def step(part: Subgraph, prompts: list[str]) -> list[float]:
        samples = part["ROLLOUT"].call_batch(Rollout.generate, prompts)
        return list(part["REWARD"].call_batch(Reward.score, list(samples)))

    rewards = mesh.subgraphs("dp").run(step, prompts)
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from enum import Enum
from typing import Any, overload

from rlmesh.errors import UsageError
from rlmesh.runtime.argument_types import require
from rlmesh.runtime.batch_split import balanced_sizes, batch_size, split_call
from rlmesh.runtime.connections.address_book import role_name
from rlmesh.runtime.default_runtime import default_runtime
from rlmesh.runtime.future import Future
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.runtime import Runtime
from rlmesh.runtime.sequence import FutureSequence
from rlmesh.runtime.serving.method_kinds import is_on_loop
from rlmesh.wire.remote_type import CONTROL_FLOW

__all__ = ["Mesh", "Subgraph", "Subgraphs"]


class Mesh:
    """All roles of a job and their axes, as ``.mesh(dp=2, tp=4)`` declared them.

    Args:
        runtime: the runtime to call by; by default the worker's.
    """

    def __init__(self, *, runtime: Runtime | None = None) -> None:
        self._runtime = runtime

    @property
    def roles(self) -> tuple[str, ...]:
        return self._caller().address_book().roles()

    def __getitem__(self, role: str | Enum | type[Any]) -> RoleGroup[Any]:
        return RoleGroup(role_name(role), runtime=self._runtime)

    def subgraphs(self, axis: str) -> Subgraphs:
        """The sub-graphs along an axis, as many as the smallest role has coordinates on the axis.

        A role with more coordinates gives each sub-graph an equal number of neighbouring ones. A role without the axis
        is part of all sub-graphs, with all of its members.

        Raises:
            UsageError: no role has the axis, or the sizes are not multiples of the smallest one.
        """
        require("subgraphs(axis)", axis, str, "the name of an axis")
        book = self._caller().address_book()
        sizes: dict[str, int] = {}
        for role in book.roles():
            axes = dict(book.meshes).get(role)
            if axes is not None and axis in axes.names:
                sizes[role] = axes.sizes[axes.names.index(axis)]
        if not sizes:
            known = sorted({name for _, axes in book.meshes for name in axes.names})
            hint = f"the axes are {', '.join(known)}" if known else "no role has axes: declare them by .mesh(dp=2)"
            raise UsageError(f"subgraphs({axis!r}): no role has that axis; {hint}")
        count = min(sizes.values())
        if odd := [f"{role} has {size}" for role, size in sizes.items() if size % count]:
            raise UsageError(
                f"subgraphs({axis!r}): the smallest role has {count} places on {axis}, and {', '.join(odd)}, which is "
                f"no multiple of it: members cannot be shared out evenly"
            )
        return Subgraphs([self._subgraph(axis, index, count, sizes) for index in range(count)])

    def _subgraph(self, axis: str, index: int, count: int, sizes: dict[str, int]) -> Subgraph:
        book = self._caller().address_book()
        groups: dict[str, RoleGroup[Any]] = {}
        for role in book.roles():
            ranks = None
            if role in sizes:
                axes, share = book.axes(role), sizes[role] // count
                own = range(index * share, (index + 1) * share)
                members = (member.rank for member in book.role(role))
                ranks = tuple(rank for rank in members if axes.coordinates(rank)[axis] in own)
            groups[role] = RoleGroup(role, runtime=self._runtime, ranks=ranks)
        return Subgraph(axis, index, groups)

    def _caller(self) -> Runtime:
        return self._runtime or default_runtime()


class Subgraph:
    """One part of the job along an axis. ``part["ROLLOUT"]`` is the group of its members of that role."""

    def __init__(self, axis: str, index: int, groups: dict[str, RoleGroup[Any]]) -> None:
        self.axis, self.index = axis, index
        self._groups = groups

    def __getitem__(self, role: str | Enum | type[Any]) -> RoleGroup[Any]:
        name = role_name(role)
        if name not in self._groups:
            raise UsageError(f"there is no role {name!r} in {self}; its roles are {', '.join(self._groups)}")
        return self._groups[name]

    def __repr__(self) -> str:
        return f"<Subgraph {self.axis}={self.index}>"


class Subgraphs(Sequence[Subgraph]):
    """All sub-graphs along an axis."""

    def __init__(self, parts: Sequence[Subgraph]) -> None:
        self._parts = list(parts)

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> Subgraph: ...
    @overload
    def __getitem__(self, index: slice) -> list[Subgraph]: ...
    def __getitem__(self, index: int | slice) -> Subgraph | list[Subgraph]:
        return self._parts[index]

    def __iter__(self) -> Iterator[Subgraph]:
        return iter(self._parts)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Run a batch along the sub-graphs.

        Arguments are split as `RoleGroup.call_batch` splits them, balanced to within one item. A plain ``function``
        runs on a thread per sub-graph, a coroutine function in a task per sub-graph on the running loop. Both make
        calls on behalf of the call that this thread or task serves. Sub-graphs that would get no item are not run.

        Args:
            function: takes a sub-graph and its share of each argument; returns one result per item.
            args: the number of items may come first, as in `RoleGroup.call_batch`.

        Returns:
            One result per item of the batch. Results that are there can be taken while other sub-graphs still run. The
            items of a sub-graph that failed raise its error.
        """
        if not callable(function):
            raise UsageError(f"run({function!r:.80}): it is a function of a sub-graph and its share of the batch")
        size, args, source = batch_size("run()", args, kwargs)
        calls = split_call(size, len(self._parts), args, kwargs, source)
        sizes = balanced_sizes(size, len(self._parts))[: len(calls)]
        begin = _begin_task if is_on_loop(function) else _begin_thread
        futures = [begin(function, part, *call) for part, call in zip(self._parts, calls, strict=False)]
        return FutureSequence(futures, sizes, getattr(function, "__name__", "run"))


def _begin_thread(
    function: Callable[..., Any], part: Subgraph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[Any]:
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            value = context.run(function, part, *args, **kwargs)
        except BaseException as error:
            future.end(None, _error_of_items(error))
        else:
            future.end(value, None)

    threading.Thread(target=work, name=f"rlmesh-{part.axis}={part.index}", daemon=True).start()
    return future


def _begin_task(
    function: Callable[..., Coroutine[Any, Any, Any]], part: Subgraph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[Any]:
    future: Future[Any] = Future()
    task = asyncio.get_running_loop().create_task(_awaiting(function(part, *args, **kwargs)))

    def ended(done: asyncio.Task[Any]) -> None:
        if done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            future.end(None, _error_of_items(error))
        else:
            future.end(done.result(), None)

    task.add_done_callback(ended)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return future


async def _awaiting(value: Awaitable[Any]) -> Any:
    return await value


def _error_of_items(error: BaseException) -> BaseException:
    """The error that the sub-graph's items raise. An exception that would end a loop over the items, such as
    StopIteration, is wrapped."""
    if not isinstance(error, CONTROL_FLOW):
        return error
    wrapped = RuntimeError(f"the function of a sub-graph raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


_running: set[asyncio.Task[Any]] = set()
"""Keeps tasks alive: a loop has only weak references to them."""
