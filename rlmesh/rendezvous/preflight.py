"""Checks between nodes before a job starts: connections, clocks, and each node's own fitness.

Each node connects to every other one at the address and by the transport that members will use: encrypted, with the
job's key, at a port that the system chose.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmesh.agent.machine_checks import CLOCK_S, Facts, judge
from rlmesh.errors import CallError, WireError
from rlmesh.runtime.handle import MemberHandle
from rlmesh.runtime.rpc import rpc

__all__ = ["PairResult", "Pong", "ask_all", "clock_notes", "matrix", "problems", "targets_of"]

PING_S = 5.0
"""Seconds that a node waits for another one's answer."""
FULL, FOLLOWING = 32, 8
"""With more than ``FULL`` nodes, each node tests only ``FOLLOWING`` of the others."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """The result of one node's connection to another.

    Attributes:
        rtt_s: duration of one call.
        clock_s: seconds that the other node's clock is ahead.
        error: why there was no answer; empty if there was.
    """

    source: int
    target: int
    rtt_s: float = 0.0
    clock_s: float = 0.0
    error: str = ""


class Pong:
    """Answers connection tests; served by each node during the checks."""

    @rpc
    async def ping(self) -> float:
        """Return this node's clock."""
        return time.time()


def targets_of(rank: int, ranks: Sequence[int], full: int = FULL) -> list[int]:
    """Return the nodes that a node connects to: all others, or the next few of very many. Node 0 is tested in
    addition."""
    at = ranks.index(rank)
    after = [*ranks[at + 1 :], *ranks[:at]]
    return [each for each in (after if len(ranks) <= full else after[:FOLLOWING]) if each != 0]


def ask_all(source: int, peers: Mapping[int, MemberHandle], timeout_s: float = PING_S) -> tuple[PairResult, ...]:
    """Connect to all peers at once, twice: the first call opens the connection, the second is timed."""
    opened = {rank: peer.options(timeout_s=timeout_s).call("ping") for rank, peer in peers.items()}
    results = []
    for rank, future in opened.items():
        try:
            future.result()
            began = time.perf_counter()
            clock = float(peers[rank].options(timeout_s=timeout_s).call("ping").result())
            rtt = time.perf_counter() - began
            results.append(PairResult(source, rank, rtt, clock - time.time() + rtt / 2))
        except (CallError, WireError) as error:
            results.append(PairResult(source, rank, error=str(error)))
    return tuple(results)


def matrix(names: Mapping[int, str], results: Iterable[PairResult]) -> str:
    """Return a table of round trips in milliseconds, from the node of the row to that of the column."""
    found = {(each.source, each.target): each for each in results}
    width = max(9, *(len(name) + 1 for name in names.values()))
    label = max(len(f"{rank} {name}") for rank, name in names.items())
    lines = [" " * label + "".join(f"{f'→ {rank}':>{width}}" for rank in names)]
    for source, name in names.items():
        cells = [_cell(found.get((source, target)), source == target) for target in names]
        lines.append(f"{f'{source} {name}':<{label}}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def _cell(result: PairResult | None, own: bool) -> str:
    if own:
        return "·"
    if result is None:
        return "no word"
    return "FAILED" if result.error else f"{result.rtt_s * 1000:.1f} ms"


def problems(
    names: Mapping[int, str], results: Sequence[PairResult], facts: Mapping[int, Facts], silent: Iterable[int] = ()
) -> list[str]:
    """Return why the job cannot start on these nodes, one sentence per reason; empty if it can."""
    found = [f"node {names[rank]} did not say what it can reach" for rank in silent]
    found += [
        f"node {names[each.source]} does not reach node {names[each.target]}: {each.error}. Does a firewall let all "
        "TCP ports through between the nodes, and is the address right (--local-addr)?"
        for each in results
        if each.error
    ]
    for rank, fact in facts.items():
        found += [
            f"node {names[rank]}: {check.name}: {check.text}; {check.advice}"
            for check in judge(fact)
            if check.verdict == "failed"
        ]
    return found


def clock_notes(names: Mapping[int, str], results: Iterable[PairResult]) -> list[str]:
    """Return the nodes whose clocks differ so much from the first one's that their logs cannot be ordered."""
    return [
        f"the clock of node {names[each.target]} is {each.clock_s:+.1f} s from that of node {names[each.source]}"
        for each in results
        if not each.error and each.source == 0 and abs(each.clock_s) > CLOCK_S
    ]
