"""Findings of the checks: the check, the place, the fault, and the repair."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["CHECKS", "CheckStopped", "EnvFinding", "EnvReport", "FindingList"]

CHECKS = {
    "interface": "spaces, return values and flags have Gymnasium's form",
    "exception": "no call raises",
    "observation": "observations lie in the observation space",
    "dtype": "observations have the dtype of their space",
    "reward": "rewards are finite numbers",
    "aliasing": "observations and infos that were returned do not change later",
    "changed-space": "the spaces stay as they are",
    "double-reset": "the environment does not reset itself",
    "after-the-end": "no step follows the end of an episode",
    "determinism": "seed and actions decide everything",
    "final-observation": "vector environments, and agents that are truncated, give the last observation",
    "seeding": "sub-environments have seeds of their own",
    "resources": "close() gives back descriptors and threads",
    "deadline": "every call returns in time",
}
"""Names of the checks, and what holds for an environment that passes."""


@dataclass(frozen=True)
class EnvFinding:
    """One fault of an environment.

    Attributes:
        check: name of the check, one of `CHECKS`.
        where: the call, or the place in a value.
        what: the fault.
        advice: the repair.
    """

    check: str
    where: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}. {self.advice}"


@dataclass(frozen=True)
class EnvReport:
    """All findings about one environment.

    Attributes:
        name: the environment.
        findings: in the order in which they were found.
        left_out: checks that could not run, since the environment hung or died in earlier ones.
    """

    name: str
    findings: tuple[EnvFinding, ...]
    left_out: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if nothing was found, and every check ran."""
        return not self.findings and not self.left_out

    def without(self, checks: Collection[str]) -> EnvReport:
        """The report without the findings of some checks."""
        return replace(self, findings=tuple(finding for finding in self.findings if finding.check not in checks))

    def lines(self) -> list[str]:
        """The report as text: a line per finding, then the verdict."""
        lines = [f"FAULT    {self.name}: {finding}" for finding in self.findings]
        lines += [f"LEFT OUT {self.name}: the checks {', '.join(self.left_out)}"] if self.left_out else []
        count = len(self.findings)
        verdict = "passed" if self.passed else f"{count} fault{'s' * (count != 1)} found"
        return [*lines, f"{self.name}: {verdict}"]


class CheckStopped(Exception):
    """A check cannot go on; the reason was told as a finding."""


class FindingList:
    """Takes findings, and passes the first of each kind on.

    Args:
        tell: receives each finding as a dict.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], object]) -> None:
        self._tell = tell
        self._known: set[tuple[str, str]] = set()

    def add(self, check: str, where: str, what: str, advice: str, *, kind: str = "") -> None:
        """Pass a finding on, unless the same check has found the same ``kind`` of fault before."""
        if (check, kind) not in self._known:
            self._known.add((check, kind))
            self._tell(asdict(EnvFinding(check, where, what, advice)))


def findings_of(messages: Sequence[dict[str, Any]]) -> list[EnvFinding]:
    """The findings that `FindingList` told."""
    return [EnvFinding(**message) for message in messages]
