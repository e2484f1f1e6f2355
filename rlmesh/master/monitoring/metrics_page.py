"""Prometheus metrics of a job: members, steps, calls, nodes, and members' own metrics. No I/O.

All values are computed from the job's context for each scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from rlmesh.agent.monitoring.usage import NodeUse
from rlmesh.job.status import SERVING, Stage
from rlmesh.master.context import JobContext
from rlmesh.observe.prometheus.exposition import Family

__all__ = ["families", "rejections"]

LOOKED_AT = 5000
"""Number of latest reports that are searched for values."""


def families(context: JobContext, uses: Mapping[int, NodeUse], now: float) -> list[Family]:
    """Return all metrics. ``uses``: usage by node rank, without nodes that did not answer."""
    return [*_of_job(context, now), *_of_members(context, uses), *_of_calls(context), *_of_nodes(context, uses),
            *_of_reports(context)]  # fmt: skip


def rejections(by_process: Mapping[str, Mapping[str, int]]) -> Family:
    """Return the count of rejected connections at the sockets of the job's processes."""
    family = Family("rlmesh_rejected_total", "Connections and packets of strangers that were rejected.", "counter")
    for process, counts in by_process.items():
        for reason, count in counts.items():
            family.add(count, process=process, reason=reason)
    return family


def _of_job(context: JobContext, now: float) -> Iterable[Family]:
    spec = context.spec
    info = Family("rlmesh_job_info", "The job; always 1.")
    info.add(1, job=spec.job_name, job_id=spec.job_id, run_dir=spec.run_dir)
    stage = Family("rlmesh_job_stage", "1 for the stage that the job is in.")
    for name in get_args(Stage):
        stage.add(name == context.stage, stage=name)
    age = Family("rlmesh_job_age_seconds", "Seconds since the job was submitted.")
    age.add(max(0.0, now - (spec.submitted_at or context.started_at)))
    restarts = Family("rlmesh_restarts_total", "Restarts of members, roles and the job.", "counter")
    counts: dict[tuple[str, str], int] = {}
    for record in context.restarts:
        key = (record.unit, record.scope)
        counts[key] = counts.get(key, 0) + 1
    for (unit, scope), count in counts.items():
        restarts.add(count, unit=unit, scope=scope)
    incidents = Family("rlmesh_incidents_total", "Failures that have an incident file.", "counter")
    incidents.add(len(context.incidents))
    return info, stage, age, restarts, incidents


def _of_members(context: JobContext, uses: Mapping[int, NodeUse]) -> Iterable[Family]:
    role_size = Family("rlmesh_role_members", "Members of a role.")
    role_ready = Family("rlmesh_role_members_ready", "Members of a role that serve calls.")
    for role in context.spec.roles:
        own = [member for member in context.members.values() if member.placement.role == role.name]
        role_size.add(role.members, role=role.name)
        role_ready.add(sum(member.state in SERVING for member in own), role=role.name)
    up = Family("rlmesh_member_up", "1 if the member's process serves calls.")
    state = Family("rlmesh_member_state", "1 for the state that the member is in.")
    incarnation = Family("rlmesh_member_incarnation", "How often the member was started again.", "gauge")
    step = Family("rlmesh_member_step", "Last step that the member reported.")
    beat = Family("rlmesh_member_last_report_timestamp_seconds", "When the member last reported.")
    resident = Family("rlmesh_member_resident_memory_bytes", "Resident memory of the member's process.")
    for member in context.members.values():
        node_rank = member.placement.node_rank
        who = {"role": member.placement.role, "rank": member.placement.rank, "node": node_rank}
        up.add(member.state in SERVING, **who)
        state.add(1, **who, state=member.state)
        incarnation.add(member.incarnation, **who)
        if member.step is not None:
            step.add(member.step, **who)
        if member.last_beat_at is not None:
            beat.add(member.last_beat_at, **who)
        use = uses.get(node_rank)
        if use is not None and member.name in use.members:
            resident.add(use.members[member.name], **who)
    return role_size, role_ready, up, state, incarnation, step, beat, resident


def _of_calls(context: JobContext) -> Iterable[Family]:
    calls = Family("rlmesh_calls_total", "Calls from one member to another.", "counter")
    failed = Family("rlmesh_calls_unanswered_total", "Calls that ended without an answer.", "counter")
    wall = Family("rlmesh_call_seconds_total", "Seconds from calls to their answers.", "counter")
    method = Family("rlmesh_call_method_seconds_total", "Seconds of calls in the method itself.", "counter")
    queued = Family("rlmesh_call_queued_seconds_total", "Seconds of calls behind others at the callee.", "counter")
    sent = Family("rlmesh_call_sent_bytes_total", "Bytes of arguments.", "counter")
    received = Family("rlmesh_call_received_bytes_total", "Bytes of results.", "counter")
    for edge in context.graph.edges():
        who = {"caller": edge.caller, "callee": edge.callee, "method": edge.method}
        stats = edge.stats
        for family, value in (
            (calls, stats.calls), (failed, stats.failed), (wall, stats.wall_s), (method, stats.method_s),
            (queued, stats.queued_s), (sent, stats.sent_bytes), (received, stats.received_bytes),
        ):  # fmt: skip
            family.add(value, **who)
    return calls, failed, wall, method, queued, sent, received


def _of_nodes(context: JobContext, uses: Mapping[int, NodeUse]) -> Iterable[Family]:
    cpus = Family("rlmesh_node_cpus", "Cores of a node.")
    memory = Family("rlmesh_node_memory_bytes", "Memory of a node.")
    devices = Family("rlmesh_node_devices", "Accelerators, or virtual slots, of a node.")
    load = Family("rlmesh_node_load1", "Load average of a node over a minute.")
    free = Family("rlmesh_node_memory_available_bytes", "Memory of a node that is not in use.")
    shm = Family("rlmesh_node_shared_memory_free_bytes", "Room in /dev/shm of a node.")
    for rank, node in context.nodes.items():
        who = {"node": rank, "name": node.name}
        cpus.add(node.cpus, **who)
        memory.add(node.memory_bytes, **who)
        devices.add(len(node.devices), **who)
        if (use := uses.get(rank)) is not None:
            load.add(use.load, **who)
            free.add(use.memory_free_bytes, **who)
            shm.add(use.shm_free_bytes, **who)
    return cpus, memory, devices, load, free, shm


def _of_reports(context: JobContext) -> Iterable[Family]:
    """Return the last value of each reported metric under one family name, because members' names may be anything."""
    reported = Family("rlmesh_reported", "Last value that a member reported, by the metric's own name.")
    latest: dict[tuple[str, int, str], float] = {}
    for record in context.records[-LOOKED_AT:]:
        for name, value in record.metrics.items():
            latest[record.role, record.rank, name] = value
    for (role, rank, name), value in latest.items():
        reported.add(value, role=role, rank=rank, metric=name)
    return (reported,)
