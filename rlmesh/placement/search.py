"""Finds a place for every bundle: greedily, and if that fails, by a search. No I/O.

The search is complete within ``SEARCH_TRIES`` tries: it reports that there is no place
only if there is none.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmesh.placement.bundles import Bundle
from rlmesh.placement.fleet import Fleet, Move, count_alike

SEARCH_TRIES = 20_000
"""Number of moves that are tried before the search gives up."""


@dataclass(frozen=True, slots=True)
class PlacedBundle:
    """The place of one bundle: the node, and each slot's devices, by position."""

    node: int
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The places of all bundles, by number; None if there are none or, with ``gave_up``, none was found."""

    taken: Mapping[int, PlacedBundle] | None
    gave_up: bool = False


def find_places(fleet: Fleet, bundles: Mapping[int, Bundle], shapes: Sequence[int]) -> SearchResult:
    """Place bundles on nodes with these shapes."""
    order = sorted(bundles, key=lambda i: urgency(bundles[i], i))
    kinds = {i: fleet.kind(bundles[i]) for i in order}
    if (taken := _one_after_the_other(fleet, bundles, order, kinds, shapes)) is not None:
        return SearchResult(taken)
    if not _could_fit(fleet, bundles, shapes):
        return SearchResult(None)
    return _Search(fleet, bundles, order, kinds, shapes).run()


def urgency(bundle: Bundle, index: int) -> tuple[object, ...]:
    """A sort key: big and bound bundles first, bundles without devices last, in the order of declaration."""
    biggest = max(slot.devices * slot.share_milli for slot in bundle.slots)
    bound = bool(bundle.adds or bundle.forbids or bundle.nodes or bundle.slots[0].only or bundle.slots[0].forbids)
    return (-biggest, -len(bundle.slots), 0 if bound else 1, index)


def preference(fleet: Fleet, bundle: Bundle, shape: int) -> float:
    """A score of a node for a bundle, lower is better: bundles with devices fill up nodes, bundles with a limit per
    node go to the emptiest, bundles without devices to the least crowded."""
    if not bundle.device_milli:
        return fleet.crowd(shape)
    free = fleet.free_milli(shape)
    return -free if any(label in fleet.limits for label, _ in bundle.adds) else free


def _one_after_the_other(
    fleet: Fleet, bundles: Mapping[int, Bundle], order: Sequence[int], kinds: Mapping[int, int], shapes: Sequence[int]
) -> dict[int, PlacedBundle] | None:
    current = list(shapes)
    taken: dict[int, PlacedBundle] = {}
    # For each kind of bundle the nodes that may still take one, best first. An entry is void when its node's shape
    # has changed. A kind that does not fit now never will again, since nodes only become fuller.
    queues: dict[int, list[tuple[float, int, int]]] = {}
    like: dict[int, Bundle] = {}
    for index in order:
        bundle, kind = bundles[index], kinds[index]
        if kind not in queues:
            like[kind] = bundle
            queues[kind] = [(preference(fleet, bundle, shape), node, shape) for node, shape in enumerate(current)]
            heapq.heapify(queues[kind])
        queue = queues[kind]
        while queue:
            _, node, shape = queue[0]
            moves = fleet.moves(bundle, kind, shape) if current[node] == shape else ()
            if not moves:
                heapq.heappop(queue)
                continue
            taken[index] = PlacedBundle(node, moves[0].devices)
            current[node] = moves[0].after
            for other, entries in queues.items():
                heapq.heappush(entries, (preference(fleet, like[other], current[node]), node, current[node]))
            break
        else:
            return None
    return taken


def _could_fit(fleet: Fleet, bundles: Mapping[int, Bundle], shapes: Sequence[int]) -> bool:
    """True if the sums allow it and each kind of bundle fits alone. Cheap; False is certain, True is not."""
    asked = Counter[str]()
    for bundle in bundles.values():
        asked["devices"] += bundle.device_milli
        asked["cpu"] += bundle.cpu_milli
        asked["memory"] += bundle.memory_bytes
    there = Counter[str]()
    for shape in shapes:
        found = fleet.shapes[shape]
        there["devices"] += sum(found.free)
        there["cpu"] += max(0, found.cpu_milli)
        there["memory"] += max(0, found.memory_bytes)
    if asked["devices"] > there["devices"]:
        return False
    if not fleet.soft and (asked["cpu"] > there["cpu"] or asked["memory"] > there["memory"]):
        return False
    counts, wanted = Counter(shapes), Counter(fleet.kind(bundle) for bundle in bundles.values())
    of_kind = {fleet.kind(bundle): bundle for bundle in bundles.values()}
    return all(_room(fleet, of_kind[kind], kind, counts, count) for kind, count in wanted.items())


def _room(fleet: Fleet, bundle: Bundle, kind: int, shapes: Mapping[int, int], wanted: int) -> bool:
    """True if this many bundles of a kind would fit alone. Some ways to put a bundle on a node leave less room
    than others, so this stops at the first choice and returns True."""
    room = 0
    for shape, count in shapes.items():
        now = shape
        while room < wanted and (moves := fleet.moves(bundle, kind, now)):
            if len(moves) > 1:
                return True
            now, room = moves[0].after, room + count
        if room >= wanted:
            return True
    return False


@dataclass(slots=True)
class _Level:
    """The nodes before one bundle: how many have each shape, and the moves not tried yet, best last."""

    counts: dict[int, int]
    untried: list[tuple[int, Move]]
    move: tuple[int, Move] | None = None


class _Search:
    """Depth-first search that remembers dead ends, for jobs that fit only in an uneven way.

    Works on the number of nodes of each shape, not on the nodes themselves.
    """

    def __init__(
        self, fleet: Fleet, bundles: Mapping[int, Bundle], order: Sequence[int], kinds: Mapping[int, int],
        shapes: Sequence[int],
    ) -> None:  # fmt: skip
        self._fleet, self._bundles, self._order, self._kinds, self._shapes = fleet, bundles, order, kinds, shapes
        self._tries = 0

    def run(self) -> SearchResult:
        dead: set[tuple[int, tuple[tuple[int, int], ...]]] = set()
        counts = dict(Counter(self._shapes))
        path = [_Level(counts, self._moves(0, counts))]
        while self._tries < SEARCH_TRIES:
            level, depth = path[-1], len(path) - 1
            if not level.untried:
                dead.add((depth, count_alike(self._fleet, level.counts)))
                path.pop()
                if not path:
                    return SearchResult(None)
                continue
            shape, move = level.move = level.untried.pop()
            if depth + 1 == len(self._order):
                return SearchResult(self._replay([each.move for each in path if each.move is not None]))
            after = dict(level.counts)
            after[shape] -= 1
            if not after[shape]:
                del after[shape]
            after[move.after] = after.get(move.after, 0) + 1
            if (depth + 1, count_alike(self._fleet, after)) not in dead:
                path.append(_Level(after, self._moves(depth + 1, after)))
        return SearchResult(None, gave_up=True)

    def _moves(self, depth: int, counts: Mapping[int, int]) -> list[tuple[int, Move]]:
        """The moves of the next bundle, best last; of moves that lead to alike nodes only the first."""
        index = self._order[depth]
        bundle, kind, fleet = self._bundles[index], self._kinds[index], self._fleet
        found: dict[tuple[int, int], tuple[int, Move]] = {}
        for shape in sorted(counts, key=lambda shape: (preference(fleet, bundle, shape), shape)):
            self._tries += 1
            for move in fleet.moves(bundle, kind, shape):
                self._tries += 1
                found.setdefault((fleet.alike[shape], fleet.alike[move.after]), (shape, move))
        return list(reversed(found.values()))

    def _replay(self, path: Sequence[tuple[int, Move]]) -> dict[int, PlacedBundle]:
        """The node of each bundle: the first one with the right shape."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for node, shape in enumerate(self._shapes):
            heapq.heappush(nodes[shape], node)
        taken = {}
        for index, (shape, move) in zip(self._order, path, strict=True):
            node = heapq.heappop(nodes[shape])
            heapq.heappush(nodes[move.after], node)
            taken[index] = PlacedBundle(node, move.devices)
        return taken
