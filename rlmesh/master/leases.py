"""The master's half of the agents' leases: which nodes have been silent for so long that nothing runs on them. Pure.

An agent ends its members when it had no renewal for ``rlmesh.agent.lease.LEASE_S``, counted from when it asked; the
master gives a node up only after ``GIVE_UP_S`` without having renewed, which is later whatever the clocks show. What
lies between is for ending the members: the agent's grace, or the guardian if the agent is stopped. A master that was
started again does not know when the one before it renewed last: it counts from its own start.
"""

from __future__ import annotations

from collections.abc import Iterable

GIVE_UP_S = 20.0
"""A node that was not renewed for so long is lost."""


class Leases:
    """The leases of all nodes. Times are seconds of a clock that counts while the machine is suspended.

    Args:
        nodes: those that another master may have granted leases to.
        now: when this master started.
    """

    def __init__(self, nodes: Iterable[int], now: float, give_up_s: float = GIVE_UP_S) -> None:
        self._renewed_at = dict.fromkeys(nodes, now)
        self._give_up_s = give_up_s

    def renew(self, node: int, now: float) -> None:
        """A lease is granted, now at the latest."""
        self._renewed_at[node] = now

    def silent(self, now: float) -> dict[int, float]:
        """Nodes on which nothing can run any longer, with for how many seconds they were silent."""
        return {node: now - at for node, at in self._renewed_at.items() if now - at >= self._give_up_s}

    def forget(self, node: int) -> None:
        """Its members are known to have ended, or it was given up."""
        self._renewed_at.pop(node, None)
