"""State that all decision modules share: the job's context, its limits, and the actions to carry out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rlmesh.job.status import MemberState
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member
from rlmesh.master.decisions.deadlines import WaitDeadlines
from rlmesh.master.jobspec import JobSpec, TimeLimits

LastLines = Callable[[str], tuple[str, ...]]
"""Reads the last lines of the log file at a path."""

SERVING: frozenset[MemberState] = frozenset({"ready", "running", "finished"})


@dataclass(slots=True)
class JobState:
    """Shared state of one job's decisions.

    Attributes:
        actions: actions that follow from the current event.
        ports: port of each elastic role's process group.
    """

    KEPT: ClassVar[Mapping[str, object]] = {"deadlines": WaitDeadlines, "ports": dict[str, int]}

    context: JobContext
    deadlines: WaitDeadlines
    last_lines: LastLines
    actions: list[ev.Action] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def spec(self) -> JobSpec:
        return self.context.spec

    @property
    def limits(self) -> TimeLimits:
        return self.context.spec.limits

    @property
    def undecided(self) -> bool:
        """True while no decision was made to end the job early: it still runs, or ends as intended."""
        return self.context.ends_as == "succeeded"

    def living(self) -> list[Member]:
        return [member for member in self.context.members.values() if not member.gone]

    def node_name(self, node_rank: int) -> str:
        node = self.context.nodes.get(node_rank)
        return node.name if node else str(node_rank)

    def do(self, *actions: ev.Action) -> None:
        self.actions.extend(actions)
