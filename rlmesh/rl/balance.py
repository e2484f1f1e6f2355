"""Distribution of work over bins: ranks, and the micro-batches of a rank. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["fill", "spread_evenly"]


def spread_evenly(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Distribute items so that the cost of the costliest bin is low.

    The longest-processing-time rule (Graham 1969): items in order of falling cost, each into the cheapest bin so far.
    The costliest bin is at most 4/3 − 1/(3 · bins) of the optimum.

    Args:
        costs: the cost of each item, ≥ 0.
        bins: number of bins, ≥ 1.

    Returns:
        the indices of each bin's items, in their original order; a bin may be empty.

    Raises:
        ValueError: ``bins`` is below 1.
    """
    if bins < 1:
        raise ValueError(f"bins must be ≥ 1, got {bins}")
    found: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, place) for place in range(bins)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, place = heapq.heappop(heap)
        found[place].append(item)
        heapq.heappush(heap, (cost + costs[item], place))
    return [sorted(items) for items in found]


def fill(sizes: Sequence[int], capacity: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Distribute items over few bins of at most ``capacity``, all about equally full.

    Starts with the smallest number of bins that the sum allows, and adds bins until all items fit by the rule of
    :func:`spread_evenly`. An item larger than the capacity gets a bin of its own.

    Args:
        sizes: the size of each item, ≥ 0.
        capacity: the capacity of a bin, ≥ 1.
        multiple_of: the number of bins is a multiple of this, so that each rank gets equally many.

    Returns:
        the indices of each bin's items, in their original order; bins may be empty if there are few items.

    Raises:
        ValueError: ``capacity`` or ``multiple_of`` is below 1.
    """
    if capacity < 1 or multiple_of < 1:
        raise ValueError(f"capacity and multiple_of must be ≥ 1, got {capacity} and {multiple_of}")
    large = [i for i, size in enumerate(sizes) if size > capacity]
    others = [i for i, size in enumerate(sizes) if size <= capacity]
    total = sum(sizes[i] for i in others)
    bins = max(-(-total // capacity), 1 if others else 0)
    while True:
        all_bins = -(-max(bins + len(large), 1) // multiple_of) * multiple_of
        spread = spread_evenly([sizes[i] for i in others], all_bins - len(large)) if others else []
        found = [[others[i] for i in items] for items in spread]
        if all(sum(sizes[i] for i in items) <= capacity for items in found):
            found += [[i] for i in large]
            return found + [[] for _ in range(all_bins - len(found))]
        bins += 1
