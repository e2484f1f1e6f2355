"""The master's half of the agents' leases: which nodes have been silent for so long that nothing runs on them. Pure.

An agent ends its members when it had no renewal for the length of its lease, counted from when it asked; the master
gives a node up only ``MARGIN_S`` after a lease that began when it renewed last, which is later whatever the clocks
show. What lies between is for ending the members: the agent's grace, or the guardian if the agent is stopped. A master
that was started again does not know when the one before it renewed last: it counts from its own start. One that stood
still itself has not heard anybody meanwhile: that time does not count.
"""

from __future__ import annotations

from collections.abc import Iterable

MARGIN_S = 5.0
"""Between the end of a node's lease and the moment from which its members may run elsewhere: longer than agent and
guardian take to end them."""
STILL_S = 2.0
"""A master that did not look for so long stood still."""


class NodeLeases:
    """The leases of all nodes. Times are seconds of a clock that counts while the machine is suspended.

    Args:
        nodes: those that another master may have granted leases to.
        now: when this master started.
        lease_s: the length of a lease.
    """

    def __init__(self, nodes: Iterable[int], now: float, lease_s: float) -> None:
        self._renewed_at = dict.fromkeys(nodes, now)
        self._give_up_s = lease_s + MARGIN_S
        self._looked_at = now

    def renew(self, node: int, now: float) -> None:
        """A lease is granted, now at the latest."""
        self._renewed_at[node] = now

    def silent(self, now: float) -> dict[int, float]:
        """Nodes on which nothing can run any longer, with for how many seconds they were silent. To be asked often."""
        away_s, self._looked_at = now - self._looked_at, now
        if away_s > STILL_S:
            self._renewed_at = {node: min(now, at + away_s) for node, at in self._renewed_at.items()}
        return {node: now - at for node, at in self._renewed_at.items() if now - at >= self._give_up_s}

    def forget(self, node: int) -> None:
        """Its members are known to have ended, or it was given up."""
        self._renewed_at.pop(node, None)
