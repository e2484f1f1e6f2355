"""The nearest valid name, for messages about a wrong one."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest valid name, or a list of the valid names if none is near."""
    import difflib

    names = sorted(set(valid))
    lowered = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    if near:
        return f" Did you mean {lowered[near[0]]!r}?"
    return f" Valid: {', '.join(names)}." if names else ""
