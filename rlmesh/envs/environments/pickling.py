"""Pickling of environments together with the episodes that they are in."""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any

import cloudpickle

__all__ = ["pickled_environments"]


def pickled_environments(environments: Any, most_bytes: int | None = None) -> bytes:
    """Environments as bytes of cloudpickle, which another process goes on with.

    Args:
        most_bytes: pickling stops when there are more bytes; None: no limit.

    Raises:
        pickle.PicklingError: an environment would come back without its episode; or there are too many bytes.
        Exception: any error of an environment that cannot be pickled.
    """
    file = _Bounded(most_bytes)
    _Pickler(file).dump(environments)
    return file.getvalue()


class _Bounded(io.BytesIO):
    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most

    def write(self, part: Any) -> int:
        if self._most is not None and self.tell() + memoryview(part).nbytes > self._most:
            raise pickle.PicklingError(f"they have more than {self._most:,} bytes")
        return super().write(part)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
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
