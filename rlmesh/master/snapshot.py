"""The state of a job as rows of its store, and back. Pure.

What is written is ``JobContext``, field by field and member by member, and what ``JobManager`` decides by besides
(``JobManager.remembered``). The values are pickled; what belongs to the process and not to the state is left out by
reference: the manager, the context, its members and the collaborators of the manager stand for themselves.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

from rlmesh.job.status import FailureInfo
from rlmesh.master import events as ev
from rlmesh.master.context import JobContext, Member
from rlmesh.master.job_manager import JobManager
from rlmesh.master.store import Key, Row, Stored
from rlmesh.placement.inventory import NodeInfo

_APART = frozenset({"spec", "members", "nodes", "failures", "records", "records_dropped"})
"""Fields of the context that are rows of their own, or in a file of their own."""
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
    for name in (field.name for field in fields(JobContext) if field.name not in _APART):
        value = getattr(context, name)
        if _is_fixed(value):
            rows["job", (name,)] = (value, partial(_fact_row, name, value))
        else:
            data = pickle.dumps(value)
            rows["job", (name,)] = (data, partial(_row, (name, "", data)))
    decisions = _dump(manager)
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
    there were. The manager stays as it is if nothing is stored."""
    context = manager.context
    facts = {str(name): data for name, _, data in stored.rows("job")}
    masters = list(stored.rows("masters"))
    if DECISIONS not in facts:
        return {}, {}, masters
    for field in fields(JobContext):
        if field.name not in _APART and field.name in facts:
            setattr(context, field.name, pickle.loads(_bytes(facts[field.name])))
    context.nodes = {node.node_rank: node for node in _values(stored, "nodes")}
    context.members = {member.id: member for member in _values(stored, "members")}
    context.failures = _values(stored, "failures")
    manager.recall(_Loader(manager, _bytes(facts[DECISIONS])).load())
    heard = {str(sender): int(str(number)) for sender, number in stored.rows("heard")}
    orders = {int(str(row[0])): pickle.loads(_bytes(row[-1])) for row in stored.rows("orders")}
    return heard, dict(sorted(orders.items())), masters


def stored_fact(stored: Stored, name: str) -> Any:
    """A field of the stored context; None if nothing is stored."""
    return next((pickle.loads(_bytes(data)) for fact, _, data in stored.rows("job") if fact == name), None)


def _row(row: Row) -> Row:
    return row


def _fact_row(name: str, value: object) -> Row:
    return (name, _text(value), pickle.dumps(value))


def _node_row(node: NodeInfo) -> Row:
    return (node.node_rank, node.name, node.hostname, node.agent_pid, pickle.dumps(node))


def _failure_row(number: int, failure: FailureInfo) -> Row:
    return (number, failure.at, failure.role, failure.rank, failure.message, pickle.dumps(failure))


def _order_row(number: int, order: ev.Action) -> Row:
    return (number, type(order).__name__, pickle.dumps(order))


def _member_row(member: Member) -> Row:
    place = member.placement
    return (
        place.role, place.rank, member.incarnation, place.node_rank, member.pid, member.state, member.step,
        member.since, pickle.dumps(member),
    )  # fmt: skip


def _is_fixed(value: object) -> bool:
    """Whether a value cannot be changed in place, so that comparing it is enough."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return isinstance(value, _PLAIN) or (parameters is not None and parameters.frozen)


def _text(value: object) -> str:
    return f"{value}" if isinstance(value, _PLAIN) else ""


def _values(stored: Stored, table: str) -> list[Any]:
    return [pickle.loads(_bytes(row[-1])) for row in stored.rows(table)]


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value


# What decisions depend on may point to the context and to the manager itself.


class _Dumper(pickle.Pickler):
    def __init__(self, file: io.BytesIO, manager: JobManager) -> None:
        super().__init__(file)
        self._names = {id(value): name for name, value in _collaborators(manager).items()}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is Member:
            return ("member", value.id)
        name = self._names.get(id(value))
        return None if name is None else (name,)


class _Loader(pickle.Unpickler):
    def __init__(self, manager: JobManager, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._manager = manager
        self._things = _collaborators(manager)

    def persistent_load(self, reference: Any) -> Any:
        if reference[0] == "member":
            return self._manager.context.members[reference[1]]
        return self._things[reference[0]]


def _collaborators(manager: JobManager) -> dict[str, object]:
    return {"manager": manager, "context": manager.context, "spec": manager.context.spec, **manager.collaborators()}


def _dump(manager: JobManager) -> bytes:
    file = io.BytesIO()
    _Dumper(file, manager).dump(manager.remembered())
    return file.getvalue()
