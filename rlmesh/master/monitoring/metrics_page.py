"""The metrics page of a job for Prometheus: members, steps, calls, nodes, and the members' own metrics. No I/O.

Everything is computed from the job's context for each scrape, so nothing has to be kept up to date in between. The
package prometheus_client has the types and writes the text; it is imported only by jobs that serve metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlmesh.agent.monitoring.usage import NodeUse
from rlmesh.job.status import SERVING, Stage
from rlmesh.master.context import JobContext

__all__ = ["families", "page_text", "rejections"]

MOST_REPORTS = 5000
"""Number of the last reports that are searched for values."""
MEMBER = ("role", "rank", "node")
EDGE = ("caller", "callee", "method")
NODE = ("node", "name")


def page_text(families: Iterable[Metric]) -> str:
    """The text of all families that have samples, in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_Scrape(family for family in families if family.samples))
    return generate_latest(registry).decode()


class _Scrape(Collector):
    """Gives the families of one scrape to a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def families(context: JobContext, uses: Mapping[int, NodeUse], now: float) -> list[Metric]:
    """All metrics. ``uses`` are by node rank; nodes that did not answer are left out."""
    return [*_of_job(context, now), *_of_members(context, uses), *_of_calls(context), *_of_nodes(context, uses),
            *_of_reports(context)]  # fmt: skip


def rejections(by_process: Mapping[str, Mapping[str, int]]) -> Metric:
    """Connections and packets that the sockets of the job's processes refused."""
    family = CounterMetricFamily(
        "rlmesh_rejected", "Connections and packets of strangers that were rejected.", labels=("process", "reason")
    )
    for process, counts in by_process.items():
        for reason, count in counts.items():
            family.add_metric((process, reason), count)
    return family


def _of_job(context: JobContext, now: float) -> Iterable[Metric]:
    spec = context.spec
    info = GaugeMetricFamily("rlmesh_job_info", "The job; always 1.", labels=("job", "job_id", "run_dir"))
    info.add_metric((spec.job_name, spec.job_id, str(spec.run_dir)), 1)
    stage = GaugeMetricFamily("rlmesh_job_stage", "1 for the stage that the job is in.", labels=("stage",))
    for name in get_args(Stage):
        stage.add_metric((name,), name == context.stage)
    started_at = spec.submitted_at or context.started_at
    age = GaugeMetricFamily(
        "rlmesh_job_age_seconds", "Seconds since the job was submitted.", max(0.0, now - started_at)
    )
    restarts = CounterMetricFamily(
        "rlmesh_restarts", "Restarts of members, roles and the job.", labels=("unit", "scope")
    )
    for key, count in Counter((record.unit, record.scope) for record in context.restarts).items():
        restarts.add_metric(key, count)
    incidents = CounterMetricFamily("rlmesh_incidents", "Failures that have an incident file.", len(context.incidents))
    return info, stage, age, restarts, incidents


def _of_members(context: JobContext, uses: Mapping[int, NodeUse]) -> Iterable[Metric]:
    role_size = GaugeMetricFamily("rlmesh_role_members", "Members of a role.", labels=("role",))
    role_ready = GaugeMetricFamily("rlmesh_role_members_ready", "Members of a role that serve calls.", labels=("role",))
    for role in context.spec.roles:
        own = [member for member in context.members.values() if member.placement.role == role.name]
        role_size.add_metric((role.name,), role.members)
        role_ready.add_metric((role.name,), sum(member.state in SERVING for member in own))
    up = GaugeMetricFamily("rlmesh_member_up", "1 if the member's process serves calls.", labels=MEMBER)
    state = GaugeMetricFamily(
        "rlmesh_member_state", "1 for the state that the member is in.", labels=(*MEMBER, "state")
    )
    incarnation = GaugeMetricFamily(
        "rlmesh_member_incarnation", "How often the member was started again.", labels=MEMBER
    )
    step = GaugeMetricFamily("rlmesh_member_step", "Last step that the member reported.", labels=MEMBER)
    beat = GaugeMetricFamily(
        "rlmesh_member_last_report_timestamp_seconds", "When the member last reported.", labels=MEMBER
    )
    resident = GaugeMetricFamily(
        "rlmesh_member_resident_memory_bytes", "Resident memory of the member's process.", labels=MEMBER
    )
    for member in context.members.values():
        node_rank = member.placement.node_rank
        labels = (member.placement.role, str(member.placement.rank), str(node_rank))
        up.add_metric(labels, member.state in SERVING)
        state.add_metric((*labels, member.state), 1)
        incarnation.add_metric(labels, member.incarnation)
        if member.step is not None:
            step.add_metric(labels, member.step)
        if member.last_beat_at is not None:
            beat.add_metric(labels, member.last_beat_at)
        use = uses.get(node_rank)
        if use is not None and member.name in use.members:
            resident.add_metric(labels, use.members[member.name])
    return role_size, role_ready, up, state, incarnation, step, beat, resident


def _of_calls(context: JobContext) -> Iterable[Metric]:
    calls = CounterMetricFamily("rlmesh_calls", "Calls from one member to another.", labels=EDGE)
    failed = CounterMetricFamily("rlmesh_calls_unanswered", "Calls that ended without an answer.", labels=EDGE)
    wall = CounterMetricFamily("rlmesh_call_seconds", "Seconds from calls to their answers.", labels=EDGE)
    method = CounterMetricFamily("rlmesh_call_method_seconds", "Seconds of calls in the method itself.", labels=EDGE)
    queued = CounterMetricFamily(
        "rlmesh_call_queued_seconds", "Seconds of calls behind others at the callee.", labels=EDGE
    )
    sent = CounterMetricFamily("rlmesh_call_sent_bytes", "Bytes of arguments.", labels=EDGE)
    received = CounterMetricFamily("rlmesh_call_received_bytes", "Bytes of results.", labels=EDGE)
    for edge in context.graph.edges():
        labels, stats = (edge.caller, edge.callee, edge.method), edge.stats
        for family, value in (
            (calls, stats.calls), (failed, stats.failed), (wall, stats.wall_s), (method, stats.method_s),
            (queued, stats.queued_s), (sent, stats.sent_bytes), (received, stats.received_bytes),
        ):  # fmt: skip
            family.add_metric(labels, value)
    return calls, failed, wall, method, queued, sent, received


def _of_nodes(context: JobContext, uses: Mapping[int, NodeUse]) -> Iterable[Metric]:
    cpus = GaugeMetricFamily("rlmesh_node_cpus", "Cores of a node.", labels=NODE)
    memory = GaugeMetricFamily("rlmesh_node_memory_bytes", "Memory of a node.", labels=NODE)
    devices = GaugeMetricFamily("rlmesh_node_devices", "Accelerators, or virtual slots, of a node.", labels=NODE)
    load = GaugeMetricFamily("rlmesh_node_load1", "Load average of a node over a minute.", labels=NODE)
    free = GaugeMetricFamily("rlmesh_node_memory_available_bytes", "Memory of a node that is not in use.", labels=NODE)
    shm = GaugeMetricFamily("rlmesh_node_shared_memory_free_bytes", "Room in /dev/shm of a node.", labels=NODE)
    for rank, node in context.nodes.items():
        labels = (str(rank), node.name)
        cpus.add_metric(labels, node.cpus)
        memory.add_metric(labels, node.memory_bytes)
        devices.add_metric(labels, len(node.devices))
        if (use := uses.get(rank)) is not None:
            load.add_metric(labels, use.load)
            free.add_metric(labels, use.memory_free_bytes)
            shm.add_metric(labels, use.shm_free_bytes)
    return cpus, memory, devices, load, free, shm


def _of_reports(context: JobContext) -> Iterable[Metric]:
    """The last value of each metric that members report, in one family, since their metrics may have any name."""
    reported = GaugeMetricFamily(
        "rlmesh_reported", "Last value that a member reported, by the metric's own name.",
        labels=("role", "rank", "metric"),
    )  # fmt: skip
    latest: dict[tuple[str, str, str], float] = {}
    for record in context.records[-MOST_REPORTS:]:
        for name, value in record.metrics.items():
            latest[record.role, str(record.rank), name] = value
    for labels, value in latest.items():
        reported.add_metric(labels, value)
    return (reported,)
