"""The state of a job as rows of its store, and back. Pure.

What is written is ``JobContext``, field by field and member by member, and what ``JobManager`` and its parts decide by
besides (their ``KEPT``). Values are JSON with a schema (:mod:`rlmesh.master.state.schema`): what is read back becomes a
record of the kind that belongs there, or is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from rlmesh.job.status import FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member
from rlmesh.master.job_manager import JobManager
from rlmesh.master.state.schema import SchemaError, decode, encode, restore_part, state_of
from rlmesh.master.state.store import Key, Row, Stored
from rlmesh.placement.machine.inventory import NodeInfo

_APART = frozenset({"spec", "members", "nodes", "failures", "records", "records_dropped"})
"""Fields of the context that are rows of their own, or in a file of their own."""
_KINDS: Mapping[str, Any] = get_type_hints(JobContext)
_ORDERS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(ev.Action)}
_MEMBER_MARK = attrgetter(*(field.name for field in fields(Member)))
_PLAIN = (str, int, float, bool, type(None))
DECISIONS = "decisions"

Rows = dict[Key, tuple[object, Callable[[], Row]]]
"""For each row what tells whether it changed, and what makes it."""


def rows_of(
    manager: JobManager, heard: Mapping[str, int], orders: Mapping[int, ev.Action], masters: Iterable[Row]
) -> Rows:
    """All rows of a job's state.

    Fields of ``Member`` must be values that are replaced, not changed in place: that is how a change is found.
    """
    context = manager.context
    rows: Rows = {}
    for name in _stored_fields():
        value = getattr(context, name)
        if _is_fixed(value):
            rows["job", (name,)] = (value, partial(_fact_row, name, value))
        else:
            data = encode(value, _KINDS[name])
            rows["job", (name,)] = (data, partial(_row, (name, "", data)))
    decisions = json.dumps(state_of(manager), separators=(",", ":"))
    rows["job", (DECISIONS,)] = (decisions, partial(_row, (DECISIONS, "", decisions)))
    for node in context.nodes.values():
        rows["nodes", (node.node_rank,)] = (node, partial(_node_row, node))
    for member in context.members.values():
        rows["members", member.id] = (_MEMBER_MARK(member), partial(_member_row, member))
    for number, failure in enumerate(context.failures):
        rows["failures", (number,)] = (failure, partial(_failure_row, number, failure))
    for sender, count in heard.items():
        rows["heard", (sender,)] = (count, partial(_row, (sender, count)))
    for number, order in orders.items():
        rows["orders", (number,)] = (order, partial(_order_row, number, order))
    for row in masters:
        rows["masters", row[:1]] = (row, partial(_row, row))
    return rows


def restore(manager: JobManager, stored: Stored) -> tuple[dict[str, int], dict[int, ev.Action], list[Row]]:
    """Put a new manager into the stored state; gives what was heard, the orders that are open, and the masters that
    there were. The manager stays as it is if nothing is stored.

    Raises:
        SchemaError: what is stored is no state of a job; the manager must not be used.
    """
    context = manager.context
    facts = {_text_of(name): data for name, _, data in stored.rows("job")}
    masters = [decode_row(row, int, int, float) for row in stored.rows("masters")]
    if DECISIONS not in facts:
        return {}, {}, masters
    for name in _stored_fields():
        if name in facts:
            setattr(context, name, decode(facts.pop(name), _KINDS[name]))
    try:
        decisions = json.loads(_text_of(facts.pop(DECISIONS)))
    except ValueError as error:
        raise SchemaError(f"what the master decides by cannot be read: {error}") from error
    if facts:
        raise SchemaError(f"there are unknown facts about the job: {', '.join(sorted(facts))}")
    context.nodes = {node.node_rank: node for node in _values(stored, "nodes", NodeInfo)}
    context.members = {member.id: member for member in _values(stored, "members", Member)}
    context.failures = _values(stored, "failures", FailureInfo)
    restore_part(manager, decisions)
    heard = dict(decode_row(row, str, int) for row in stored.rows("heard"))
    rows = (decode_row(row, int, str, str) for row in stored.rows("orders"))
    orders: dict[int, ev.Action] = {number: _order_of(kind, data) for number, kind, data in rows}
    return heard, dict(sorted(orders.items())), masters


def stored_fact(stored: Stored, name: str) -> Any:
    """A field of the stored context; None if nothing is stored.

    Raises:
        SchemaError: something else is stored there.
    """
    return next((decode(data, _KINDS[name]) for fact, _, data in stored.rows("job") if fact == name), None)


def decode_row(row: Row, *kinds: type) -> Any:
    """The values of a row, each of which is of its kind.

    Raises:
        SchemaError: one of them is not.
    """
    if len(row) != len(kinds) or any(type(value) is not kind for value, kind in zip(row, kinds, strict=True)):
        raise SchemaError(f"a row of {', '.join(kind.__name__ for kind in kinds)} was expected, not {row!r:.80}")
    return row


def _order_of(kind: str, data: str) -> Any:
    if kind not in _ORDERS:
        raise SchemaError(f"there is an order of an unknown kind: {kind!r:.80}")
    return decode(data, _ORDERS[kind])


def _stored_fields() -> list[str]:
    return [field.name for field in fields(JobContext) if field.name not in _APART]


def _row(row: Row) -> Row:
    return row


def _fact_row(name: str, value: object) -> Row:
    return (name, _text(value), encode(value, _KINDS[name]))


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


def _text(value: object) -> str:
    return f"{value}" if isinstance(value, _PLAIN) else ""


def _values(stored: Stored, table: str, kind: Any) -> list[Any]:
    return [decode(row[-1], kind) for row in stored.rows(table)]


def _text_of(value: object) -> str:
    if not isinstance(value, str):
        raise SchemaError(f"a text was expected, not {type(value).__name__}")
    return value
