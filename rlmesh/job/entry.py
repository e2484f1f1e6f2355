"""What a worker runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Entry", "EntryKind"]

EntryKind = Literal["class", "function", "script"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a worker runs. ``module`` may be ``__main__``: then the worker imports the submitter's script.

    ``class`` and ``function`` have ``module`` and ``name``. ``script`` has ``script`` (an absolute path) and
    ``args``; with an empty ``script`` it is ``module`` that is run as ``__main__``, as ``python -m`` does.
    """

    kind: EntryKind
    module: str = ""
    name: str = ""
    script: str = ""
    args: tuple[str, ...] = ()
