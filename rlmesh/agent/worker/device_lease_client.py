"""Device leases of a worker: from the agent of its node, or, for a rank of a group that spans nodes, from all of the
group's agents, one after the other in their global order.

If each rank asked only its own node, two groups could get their turns in different orders, and each would wait for the
other forever. With one order the first node decides for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rlmesh.placement.device_leases import Acquisition, LeaseAnswer, MemberKey
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.process import clock

__all__ = ["DeviceLeaseClient"]

LEASE_MARGIN_S = 10.0
"""Seconds beyond a member's own timeout that the answer may take that it did not get its devices."""


class DeviceLeaseClient:
    """The lease client of one member.

    Args:
        agents: the agents by node, of all nodes of the member's group, or only of its own node.
        own: the member's node.
        who: the member.
        members: the number of members of its role.
    """

    def __init__(self, agents: Mapping[int, MemberHandle], own: int, who: MemberKey, members: int) -> None:
        self._agents, self._own, self._who = dict(agents), own, who
        role, _, incarnation = who
        spans = len(self._agents) > 1
        self._group = tuple((role, rank, incarnation) for rank in range(members)) if spans else ()

    def lease_devices(self, timeout_s: float) -> Future[Any]:
        if not self._group:
            return self.ask(self._own, timeout_s)
        return _Request(self, Acquisition(self._agents), self._own, timeout_s).start()

    def return_devices(self) -> Future[Any]:
        return self.give_back(self._agents)

    def ask(self, node: int, timeout_s: float) -> Future[Any]:
        """Ask one node's agent."""
        agent = self._agents[node].options(timeout_s=timeout_s + LEASE_MARGIN_S)
        return agent.call("lease_devices", self._who, timeout_s, self._group)

    def give_back(self, nodes: Iterable[int]) -> Future[Any]:
        """Return the devices to the agents of these nodes, the last one first."""
        given = [self._agents[node].call("return_devices", self._who) for node in sorted(nodes, reverse=True)]
        return given[0] if len(given) == 1 else _gathered(given)


class _Request:
    """One lease request over all nodes."""

    def __init__(self, link: DeviceLeaseClient, nodes: Acquisition, own: int, timeout_s: float) -> None:
        self._link, self._nodes, self._own = link, nodes, own
        self._began = clock.now()
        self._deadline = self._began + timeout_s
        self._granted = LeaseAnswer(True)
        self._answer: Future[Any] = Future()

    def start(self) -> Future[Any]:
        self._ask_next()
        return self._answer

    def _ask_next(self) -> None:
        """Ask the next node; runs on the calling thread first, then on the runtime's loop."""
        node = self._nodes.next()
        if node is None:
            waited_s = clock.now() - self._began
            if self._answer.set_running_or_notify_cancel():
                self._answer.set_result(replace(self._granted, waited_s=waited_s))
            return
        asked = self._link.ask(node, max(0.0, self._deadline - clock.now()))
        # Whoever cancelled has returned the devices of all nodes, but maybe before this node was asked.
        if self._answer.cancelled():
            asked.cancel()
            self._link.give_back([node])
            return
        asked.add_done_callback(lambda done: self._answered(node, done))

    def _answered(self, node: int, asked: Future[Any]) -> None:
        if self._answer.cancelled():
            asked.cancel()
            self._link.give_back([node])
            return
        error = None if asked.cancelled() else asked.exception()
        answer: LeaseAnswer | None = None if asked.cancelled() or error is not None else asked.result()
        if answer is not None and answer.granted:
            if node == self._own:
                self._granted = answer
            self._ask_next()
            return
        self._link.give_back(self._nodes.asked)
        if not self._answer.set_running_or_notify_cancel():
            return
        if answer is None:
            self._answer.set_exception(error or TimeoutError(f"the lease of node {node} was cancelled"))
        else:
            devices = answer.devices or (f"its turn on node {node}",)
            why = f"on node {node}: {answer.why}"
            self._answer.set_result(LeaseAnswer(False, devices, clock.now() - self._began, why))


def _gathered(futures: Sequence[Future[Any]]) -> Future[Any]:
    """A future that is done when all of them are, with the first error if there is one."""
    together: Future[Any] = Future()
    together.set_running_or_notify_cancel()
    left = [len(futures)]
    lock = threading.Lock()

    def done(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            together.set_exception(errors[0])
        else:
            together.set_result(None)

    for future in futures:
        future.add_done_callback(done)
    return together
