"""Devices of a node that are close to each other: linked by NVLink, else on the same NUMA node. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

SAME_NUMA = 1
PER_LINK = 4
"""One NVLink counts for more than the same NUMA node."""


def close_devices(
    allowed: Sequence[int], wanted: int, links: Sequence[Sequence[int]], numa: Sequence[int | None]
) -> tuple[int, ...]:
    """Choose ``wanted`` of the ``allowed`` positions that are close to each other; the lowest ones on a tie.

    From each position a set is grown by the closest position, and the best set is taken. ``links[i][j]``
    is the number of NVLinks between two positions, ``numa[i]`` the NUMA node of one. In the result neighbours are
    close.
    """
    if wanted == len(allowed) and _is_uniform(allowed, links, numa):
        return tuple(allowed)
    if _is_uniform(allowed, links, numa):
        return tuple(allowed[:wanted])
    best: tuple[int, tuple[int, ...]] | None = None
    for seed in allowed:
        grown, total = [seed], 0
        rest = [i for i in allowed if i != seed]
        pull = {i: _score(seed, i, links, numa) for i in rest}
        while len(grown) < wanted:
            nearest = max(rest, key=lambda i: (pull[i], _score(grown[-1], i, links, numa), -i))
            total += pull[nearest]
            grown.append(nearest)
            rest.remove(nearest)
            for i in rest:
                pull[i] += _score(nearest, i, links, numa)
        # The best set; of equally good ones the one with the lowest positions, so that plans are deterministic.
        if best is None or (-total, sorted(grown)) < (-best[0], sorted(best[1])):
            best = (total, tuple(grown))
    assert best is not None
    return best[1]


def _score(i: int, j: int, links: Sequence[Sequence[int]], numa: Sequence[int | None]) -> int:
    return PER_LINK * links[i][j] + SAME_NUMA * (numa[i] is not None and numa[i] == numa[j])


def _is_uniform(allowed: Sequence[int], links: Sequence[Sequence[int]], numa: Sequence[int | None]) -> bool:
    scores = {_score(i, j, links, numa) for i in allowed for j in allowed if i < j}
    return len(scores) <= 1
