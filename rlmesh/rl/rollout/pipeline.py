"""`Pipeline`: how far sampling may be ahead of training, parsed from ``Run(pipeline=…)``. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlmesh.errors import UsageError
from rlmesh.rl.faults import did_you_mean

__all__ = ["Pipeline"]

NAMES = ("sync", "one-step-off", "async")
FORMS = "'sync', 'one-step-off', 'async' and 'async(staleness=2)'"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The settings of the training loop that make it synchronous, one step off or asynchronous.

    Step s (from 1 on) begins with the weights of version s - 1. If v is the oldest version that sampled a token of a
    group, the group's staleness in step s is ``s - 1 - v``. Staleness 0 is on-policy.

    Attributes:
        name: ``sync``, ``one-step-off`` or ``async``.
        staleness: the largest staleness that a group may have.
        drains: True: a push of weights waits until no response is being sampled, so each response has one version,
            which follows from its step. False: responses continue across a push.
    """

    name: str
    staleness: int
    drains: bool

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Parse a setting.

        Raises:
            UsageError: there is no such pipeline.
        """
        given = text.strip()
        if given == "sync":
            return cls(given, 0, drains=True)
        if given == "one-step-off":
            return cls(given, 1, drains=True)
        found = re.fullmatch(r"async(?:\(\s*(?:staleness\s*=\s*)?(-?\d+)\s*\))?", given)
        if found is None:
            advice = did_you_mean(given.partition("(")[0].strip().replace("_", "-"), NAMES)
            raise UsageError(f"pipeline={text!r}: there is {FORMS}{advice}")
        staleness = int(found[1] or 1)
        if staleness < 1:
            raise UsageError(f"pipeline={text!r}: staleness must be ≥ 1; 'sync' is the pipeline of staleness 0")
        return cls("async", staleness, drains=False)
