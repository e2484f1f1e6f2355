"""Views of a group for type checkers: the types of ``call`` after ``group.options(…)``.

At run time a view is a plain `RoleGroup`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, overload

from rlmesh.runtime.calling.gathering import GroupOutcomes
from rlmesh.runtime.future import Future
from rlmesh.runtime.group import RoleGroup
from rlmesh.runtime.handle import A, Items, P, R, X


class CollectedGroup(RoleGroup[A]):
    """A group with ``options(return_exceptions=True)``: calls return `GroupOutcomes`."""

    @overload  # type: ignore[override]
    def call(
        self, method: Callable[Concatenate[A, P], Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[GroupOutcomes]: ...
    @overload
    def call(self, method: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Future[GroupOutcomes]: ...
    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[GroupOutcomes]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Any: ...

    def call_shards(  # type: ignore[override, empty-body]
        self, method: Callable[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Future[GroupOutcomes]: ...


class ScatteredGroup(RoleGroup[A]):
    """A group with ``options(scatter=True)``: item i of each splittable argument goes to member i."""

    @overload  # type: ignore[override]
    def call(
        self, method: Callable[[A, X], Coroutine[Any, Any, R]], one: X | Items[X], /, **kwargs: Any
    ) -> Future[list[R]]: ...
    @overload
    def call(self, method: Callable[[A, X], R], one: X | Items[X], /, **kwargs: Any) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[[X], Coroutine[Any, Any, R]], one: X | Items[X], /, **kwargs: Any
    ) -> Future[list[R]]: ...
    @overload
    def call(self, method: Callable[[X], R], one: X | Items[X], /, **kwargs: Any) -> Future[list[R]]: ...
    @overload
    def call(
        self, method: Callable[..., Coroutine[Any, Any, R]], one: Any, two: Any, /, *more: Any, **kwargs: Any
    ) -> Future[list[R]]: ...
    @overload
    def call(self, method: Callable[..., R], one: Any, two: Any, /, *more: Any, **kwargs: Any) -> Future[list[R]]: ...
    @overload
    def call(self, method: Callable[..., Coroutine[Any, Any, R]], /, **kwargs: Any) -> Future[list[R]]: ...
    @overload
    def call(self, method: Callable[..., R], /, **kwargs: Any) -> Future[list[R]]: ...
    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[list[Any]]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> Any: ...
