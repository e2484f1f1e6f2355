"""The persisted state of a job as one record, written as rows of the store and read back. No I/O.

Values are JSON with a schema (:mod:`rlmesh.master.state.schema`): what is read back becomes a record of the declared
type, or is refused. Rows of the previous version are migrated when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, get_args, get_type_hints

from rlmesh.job.status import FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member
from rlmesh.master.decisions.job_state import DecisionState
from rlmesh.master.jobspec import JobSpec
from rlmesh.master.state.schema import SchemaError, decode, encode, from_plain, to_plain
from rlmesh.master.state.store import SCHEMA, Key, Row, Stored
from rlmesh.placement.machine.inventory import NodeInfo

_APART = frozenset({"spec", "members", "nodes", "failures", "records", "records_dropped"})
"""Fields of the context that are rows of their own, or in a file of their own."""
_KINDS: Mapping[str, Any] = get_type_hints(JobContext)
_FACTS = [item.name for item in fields(JobContext) if item.name not in _APART]
_ORDERS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(ev.Action)}
_MEMBER_MARK = attrgetter(*(item.name for item in fields(Member)))
_PLAIN = (str, int, float, bool, type(None))
DECISIONS = "decisions"

Rows = dict[Key, tuple[object, Callable[[], Row]]]
"""For each row a value that changes with it, and a function that makes it."""


@dataclass(slots=True)
class Snapshot:
    """All persisted state of one job. Metric records are in a file of their own.

    Fields of ``Member`` must be values that are replaced, not changed in place, so that changes are detected.

    Attributes:
        heard: number of the last message taken from each sender.
        orders: orders that are not carried out yet, by number.
        masters: number, pid and start time of each master.
    """

    VERSION: ClassVar[int] = SCHEMA

    context: JobContext
    decisions: DecisionState
    heard: dict[str, int] = field(default_factory=dict)
    orders: dict[int, ev.Action] = field(default_factory=dict)
    masters: list[Row] = field(default_factory=list)

    @classmethod
    def of_rows(cls, stored: Stored, spec: JobSpec, now: float) -> Snapshot:
        """Return the stored state of a job; the state of a new job if there is none.

        Raises:
            SchemaError: the rows are not the state of a job.
        """
        facts = {_text_of(name): data for name, _, data in stored.rows("job")}
        masters = [decode_row(row, int, int, float) for row in stored.rows("masters")]
        if DECISIONS not in facts:
            return cls(JobContext.initial(spec, now), DecisionState.initial(spec, now), masters=masters)
        decisions = _decisions_of(facts.pop(DECISIONS))
        context = JobContext.initial(spec, now)
        for name in facts.keys() & set(_FACTS):
            setattr(context, name, decode(facts.pop(name), _KINDS[name]))
        if facts:
            raise SchemaError(f"there are unknown facts about the job: {', '.join(sorted(facts))}")
        context.nodes = {node.node_rank: node for node in _values(stored, "nodes", NodeInfo)}
        context.members = {member.id: member for member in _values(stored, "members", Member)}
        context.failures = _values(stored, "failures", FailureInfo)
        heard = dict(decode_row(row, str, int) for row in stored.rows("heard"))
        rows = (decode_row(row, int, str, str) for row in stored.rows("orders"))
        orders = dict(sorted((number, _order_of(kind, data)) for number, kind, data in rows))
        return cls(context, decisions, heard, orders, masters)

    def rows(self) -> Rows:
        """Return all rows of the state."""
        context = self.context
        rows: Rows = {}
        for name in _FACTS:
            value = getattr(context, name)
            if _is_fixed(value):
                rows["job", (name,)] = (value, partial(_fact_row, name, value))
            else:
                data = encode(value, _KINDS[name])
                rows["job", (name,)] = (data, partial(_row, (name, "", data)))
        record = {"version": self.VERSION, **to_plain(self.decisions, DecisionState)}
        decisions = json.dumps(record, separators=(",", ":"))
        rows["job", (DECISIONS,)] = (decisions, partial(_row, (DECISIONS, "", decisions)))
        for node in context.nodes.values():
            rows["nodes", (node.node_rank,)] = (node, partial(_node_row, node))
        for member in context.members.values():
            rows["members", member.id] = (_MEMBER_MARK(member), partial(_member_row, member))
        for number, failure in enumerate(context.failures):
            rows["failures", (number,)] = (failure, partial(_failure_row, number, failure))
        for sender, count in self.heard.items():
            rows["heard", (sender,)] = (count, partial(_row, (sender, count)))
        for number, order in self.orders.items():
            rows["orders", (number,)] = (order, partial(_order_row, number, order))
        for row in self.masters:
            rows["masters", row[:1]] = (row, partial(_row, row))
        return rows


def stored_fact(stored: Stored, name: str) -> Any:
    """Return a field of the stored context; None if nothing is stored.

    Raises:
        SchemaError: the stored value has another type.
    """
    return next((decode(data, _KINDS[name]) for fact, _, data in stored.rows("job") if fact == name), None)


def decode_row(row: Row, *kinds: type) -> Any:
    """Return a row whose values have the given types.

    Raises:
        SchemaError: a value has another type.
    """
    if len(row) != len(kinds) or any(type(value) is not kind for value, kind in zip(row, kinds, strict=True)):
        raise SchemaError(f"a row of {', '.join(kind.__name__ for kind in kinds)} was expected, not {row!r:.80}")
    return row


def _decisions_of(data: object) -> DecisionState:
    try:
        record = json.loads(_text_of(data))
        version = record.pop("version", 2)
        if version == 2:
            record = _migrated_from_2(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SchemaError(f"the state of the master's decisions cannot be read: {error!r}") from error
    if version not in (2, Snapshot.VERSION):
        raise SchemaError(f"the state of the master's decisions has version {version!r:.80}, not {Snapshot.VERSION}")
    decisions: DecisionState = from_plain(record, DecisionState)
    return decisions


def _migrated_from_2(old: dict[str, Any]) -> dict[str, Any]:
    """Return the decisions of version 2, which had the attributes of nine objects, as those of this version."""
    losses, failures, health = old["_losses"], old["_failing"]["_failures"], old["_watch"]
    return {
        "deadlines": old["_state"]["deadlines"],
        "stop": {name.removeprefix("_"): value for name, value in old["_together"].items()},
        "ports": old["_state"]["ports"],
        "recoveries": [
            {"unplaced" if name == "homeless" else name: value for name, value in recovery.items()}
            for recovery in old["_recoveries"]["_active"]
        ],
        "ports_asked": old["_recoveries"]["_ports_asked"],
        "bad_devices": old["_moves"]["bad_devices"],
        "no_room": losses["_short"],
        "room_until": losses["_wait_until"],
        "failures": {"found": failures["_found"], "settle_at": failures["_settle_at"]},
        "health": {
            "answers": health["_diagnosis"]["_seen"],
            "asked_at": health["_diagnosis"]["_asked_at"],
            "hang": health["_hang"],
            "stacks_by": health["_stacks_by"],
        },
    }


def _order_of(kind: str, data: str) -> Any:
    if kind not in _ORDERS:
        raise SchemaError(f"there is an order of an unknown kind: {kind!r:.80}")
    return decode(data, _ORDERS[kind])


def _row(row: Row) -> Row:
    return row


def _fact_row(name: str, value: object) -> Row:
    return (name, f"{value}" if isinstance(value, _PLAIN) else "", encode(value, _KINDS[name]))


def _node_row(node: NodeInfo) -> Row:
    return (node.node_rank, node.name, node.hostname, node.agent_pid, encode(node, NodeInfo))


def _failure_row(number: int, failure: FailureInfo) -> Row:
    return (number, failure.at, failure.role, failure.rank, failure.message, encode(failure, FailureInfo))


def _order_row(number: int, order: ev.Action) -> Row:
    return (number, type(order).__name__, encode(order, type(order)))


def _member_row(member: Member) -> Row:
    place = member.placement
    return (
        place.role, place.rank, member.incarnation, place.node_rank, member.pid, member.state, member.step,
        member.since, encode(member, Member),
    )  # fmt: skip


def _is_fixed(value: object) -> bool:
    """True if a value cannot be changed in place, so that comparing it detects every change."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return isinstance(value, _PLAIN) or (parameters is not None and parameters.frozen)


def _values(stored: Stored, table: str, kind: Any) -> list[Any]:
    return [decode(row[-1], kind) for row in stored.rows(table)]


def _text_of(value: object) -> str:
    if not isinstance(value, str):
        raise SchemaError(f"a text was expected, not {type(value).__name__}")
    return value
