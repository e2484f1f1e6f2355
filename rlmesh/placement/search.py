"""Finds a place for every chunk: one after the other, and where that gets stuck, by trying again. Pure.

The second way is complete as long as it takes no more than ``SEARCH_TRIES``: it says that there is no place
only if there is none.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmesh.placement.bundles import Chunk
from rlmesh.placement.fleet import Fleet, Move, count_alike

SEARCH_TRIES = 20_000
"""Most moves that are looked at before the search gives up."""


@dataclass(frozen=True, slots=True)
class PlacedBundle:
    """Where one chunk went: the node, and each slot's devices, by position."""

    node: int
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Where all chunks went, by number; None if there is no place. ``gave_up``: or at least none was found."""

    taken: Mapping[int, PlacedBundle] | None
    gave_up: bool = False


def find_places(fleet: Fleet, chunks: Mapping[int, Chunk], shapes: Sequence[int]) -> SearchResult:
    """Place ``chunks`` on nodes whose shapes are ``shapes``."""
    order = sorted(chunks, key=lambda i: urgency(chunks[i], i))
    kinds = {i: fleet.kind(chunks[i]) for i in order}
    if (taken := _one_after_the_other(fleet, chunks, order, kinds, shapes)) is not None:
        return SearchResult(taken)
    if not _could_fit(fleet, chunks, shapes):
        return SearchResult(None)
    return _Search(fleet, chunks, order, kinds, shapes).run()


def urgency(chunk: Chunk, index: int) -> tuple[object, ...]:
    """Big and bound chunks first; without devices last, in the order of declaration."""
    biggest = max(slot.devices * slot.share_milli for slot in chunk.slots)
    bound = bool(chunk.adds or chunk.forbids or chunk.nodes or chunk.slots[0].only or chunk.slots[0].forbids)
    return (-biggest, -len(chunk.slots), 0 if bound else 1, index)


def preference(fleet: Fleet, chunk: Chunk, shape: int) -> float:
    """Which node to try first, the lower the better: chunks with devices fill up nodes, those of which a node may
    hold only some go to the emptiest, those without devices to the least crowded."""
    if not chunk.device_milli:
        return fleet.crowd(shape)
    free = fleet.free_milli(shape)
    return -free if any(label in fleet.limits for label, _ in chunk.adds) else free


def _one_after_the_other(
    fleet: Fleet, chunks: Mapping[int, Chunk], order: Sequence[int], kinds: Mapping[int, int], shapes: Sequence[int]
) -> dict[int, PlacedBundle] | None:
    current = list(shapes)
    taken: dict[int, PlacedBundle] = {}
    # For each kind of chunk the nodes that may still take one, best first. An entry is void when its node's shape
    # has changed; where a kind does not fit now it never will again, since nodes only become fuller.
    queues: dict[int, list[tuple[float, int, int]]] = {}
    like: dict[int, Chunk] = {}
    for index in order:
        chunk, kind = chunks[index], kinds[index]
        if kind not in queues:
            like[kind] = chunk
            queues[kind] = [(preference(fleet, chunk, shape), node, shape) for node, shape in enumerate(current)]
            heapq.heapify(queues[kind])
        queue = queues[kind]
        while queue:
            _, node, shape = queue[0]
            moves = fleet.moves(chunk, kind, shape) if current[node] == shape else ()
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


def _could_fit(fleet: Fleet, chunks: Mapping[int, Chunk], shapes: Sequence[int]) -> bool:
    """Whether the sums allow it, and each kind of chunk fits at least alone. Cheap, and right when it says no."""
    asked = Counter[str]()
    for chunk in chunks.values():
        asked["devices"] += chunk.device_milli
        asked["cpu"] += chunk.cpu_milli
        asked["memory"] += chunk.memory_bytes
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
    counts, wanted = Counter(shapes), Counter(fleet.kind(chunk) for chunk in chunks.values())
    of_kind = {fleet.kind(chunk): chunk for chunk in chunks.values()}
    return all(_room(fleet, of_kind[kind], kind, counts, count) for kind, count in wanted.items())


def _room(fleet: Fleet, chunk: Chunk, kind: int, shapes: Mapping[int, int], wanted: int) -> bool:
    """Whether so many chunks of a kind would fit if they were alone. With some ways to put a chunk on a node fewer
    may follow than with others, so this looks no further where there are several."""
    room = 0
    for shape, count in shapes.items():
        now = shape
        while room < wanted and (moves := fleet.moves(chunk, kind, now)):
            if len(moves) > 1:
                return True
            now, room = moves[0].after, room + count
        if room >= wanted:
            return True
    return False


@dataclass(slots=True)
class _Level:
    """The nodes before one chunk: how many have each shape, and the moves not tried yet, best last."""

    counts: dict[int, int]
    untried: list[tuple[int, Move]]
    move: tuple[int, Move] | None = None


class _Search:
    """Depth first with a memory of dead ends, for jobs that fit only in an uneven way.

    Works on how many nodes have each shape, not on the nodes themselves.
    """

    def __init__(
        self, fleet: Fleet, chunks: Mapping[int, Chunk], order: Sequence[int], kinds: Mapping[int, int],
        shapes: Sequence[int],
    ) -> None:  # fmt: skip
        self._fleet, self._chunks, self._order, self._kinds, self._shapes = fleet, chunks, order, kinds, shapes
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
        """What can be done with the next chunk, best last; of what leads to nodes that are alike only the first."""
        index = self._order[depth]
        chunk, kind, fleet = self._chunks[index], self._kinds[index], self._fleet
        found: dict[tuple[int, int], tuple[int, Move]] = {}
        for shape in sorted(counts, key=lambda shape: (preference(fleet, chunk, shape), shape)):
            self._tries += 1
            for move in fleet.moves(chunk, kind, shape):
                self._tries += 1
                found.setdefault((fleet.alike[shape], fleet.alike[move.after]), (shape, move))
        return list(reversed(found.values()))

    def _replay(self, path: Sequence[tuple[int, Move]]) -> dict[int, PlacedBundle]:
        """Which node each chunk goes to: of those with the shape, the first."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for node, shape in enumerate(self._shapes):
            heapq.heappush(nodes[shape], node)
        taken = {}
        for index, (shape, move) in zip(self._order, path, strict=True):
            node = heapq.heappop(nodes[shape])
            heapq.heappush(nodes[move.after], node)
            taken[index] = PlacedBundle(node, move.devices)
        return taken
