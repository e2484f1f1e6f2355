"""The master's side of the agents' leases: which nodes have been silent for so long that nothing runs on them. No I/O.

An agent ends its members when it got no renewal for the length of its lease, counted from its request. The master
counts the same lease from the moment in which it answered, which is always later than the request, and gives the node
up ``MARGIN_S`` after that lease's end. The margin is for ending the members: the agent's grace, or the guardian if the
agent is stopped. A restarted master does not know when its predecessor last renewed, so it counts from its own start.
Time in which the master itself was suspended does not count, because it could not hear any agent.
"""

from __future__ import annotations

from collections.abc import Iterable

MARGIN_S = 5.0
"""Seconds between the end of a node's lease and the restart of its members elsewhere: longer than agent and guardian
need to end them."""
SUSPENDED_S = 2.0
"""Seconds between two checks from which the master counts as suspended."""


class NodeLeases:
    """The leases of all nodes. Times are seconds of a clock that counts while the machine is suspended.

    Args:
        nodes: nodes to which a previous master may have granted leases.
        now: when this master started.
        lease_s: length of a lease.
    """

    def __init__(self, nodes: Iterable[int], now: float, lease_s: float) -> None:
        self._renewed_at = dict.fromkeys(nodes, now)
        self._give_up_s = lease_s + MARGIN_S
        self._checked_at = now

    def renew(self, node: int, now: float) -> None:
        """Record that a lease is granted at ``now`` or before."""
        self._renewed_at[node] = now

    def silent(self, now: float) -> dict[int, float]:
        """Return the nodes on which nothing can run any more, with the seconds of their silence. Call it often."""
        away_s, self._checked_at = now - self._checked_at, now
        if away_s > SUSPENDED_S:
            self._renewed_at = {node: min(now, at + away_s) for node, at in self._renewed_at.items()}
        return {node: now - at for node, at in self._renewed_at.items() if now - at >= self._give_up_s}

    def forget(self, node: int) -> None:
        """Remove a node that was given up, or whose members are known to have ended."""
        self._renewed_at.pop(node, None)
