"""Pickling of environments together with the episodes that they are in."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any

import cloudpickle

__all__ = ["EnvironmentPickler"]


class EnvironmentPickler:
    """Environments as bytes that cloudpickle reads, and that another process goes on with.

    The first time, all objects within the environments are looked at, and those refused that come back without their
    episode. Later ones of the same classes are pickled in less than half of the time.

    Args:
        most_bytes: pickling stops when there are more bytes; None: no limit.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self._checked: set[tuple[type, ...]] = set()

    def __call__(self, environments: Any) -> bytes:
        """The environments as bytes.

        Raises:
            pickle.PicklingError: an environment would come back without its episode; or there are too many bytes.
            Exception: any error of an environment that cannot be pickled.
        """
        kinds = tuple(kind for env in environments for kind in _layers(env))
        if kinds in self._checked:  # what only cloudpickle can pickle fails here
            with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
                file = _Bounded(self._most)
                pickle.Pickler(file, pickle.HIGHEST_PROTOCOL).dump(environments)
                return file.getvalue()
        file = _Bounded(self._most)
        _LookingPickler(file).dump(environments)
        self._checked.add(kinds)
        return file.getvalue()


def _layers(env: Any) -> Iterator[type]:
    """The classes of an environment and of those that it wraps."""
    while env is not None:
        yield type(env)
        env = getattr(env, "__dict__", {}).get("env")


class _Bounded(io.BytesIO):
    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most

    def write(self, part: Any) -> int:
        if self._most is not None and self.tell() + memoryview(part).nbytes > self._most:
            raise pickle.PicklingError(f"they have more than {self._most:,} bytes")
        return super().write(part)


class _LookingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        if forgets_its_episode(kind):
            raise pickle.PicklingError(
                f"{kind.__name__} inherits EzPickle: only the arguments of its constructor are pickled, not its episode"
            )
        return super().reducer_override(obj)


@cache
def forgets_its_episode(kind: type) -> bool:
    """True for classes that inherit their pickling from EzPickle, of Gymnasium or of PettingZoo."""
    owner = next((base for base in kind.__mro__ if "__getstate__" in vars(base) or "__reduce__" in vars(base)), object)
    return owner.__name__ == "EzPickle"
