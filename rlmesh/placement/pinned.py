"""Members that stay where they are while others are placed anew. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rlmesh.errors import PlacementError
from rlmesh.placement.bundles import Bundle, MemberShare
from rlmesh.placement.fleet import Fleet
from rlmesh.placement.plan import Placement
from rlmesh.placement.search import PlacedBundle


class PinnedBundles:
    """The bundles of a job, some of whose members are placed already.

    A bundle with pinned and other members is split into the slots with pinned members and the rest, which must be on
    the same node.

    Attributes:
        whole: the bundles before the split.
        bundles: the same, with the rest of split bundles in their place and their pinned slots at the end.
    """

    def __init__(self, bundles: Sequence[Bundle], pinned: Sequence[Placement]) -> None:
        self.whole = tuple(bundles)
        self._at = {(p.role, p.rank): p for p in pinned}
        self._slots: dict[int, list[int]] = {}
        """For each bundle with pinned members, the slots that have them."""
        rest: list[Bundle] = list(bundles)
        self._split: dict[int, int] = {}
        """For each split bundle, the position of its pinned slots."""
        for number, bundle in enumerate(bundles):
            slots = [i for i, slot in enumerate(bundle.slots) if any(self._is_pinned(part) for part in slot.parts)]
            if not slots:
                continue
            self._slots[number] = slots
            if len(slots) < len(bundle.slots):
                self._split[number] = len(rest)
                rest.append(replace(bundle, slots=tuple(bundle.slots[i] for i in slots)))
        for number in self._split:
            bundle, slots = bundles[number], self._slots[number]
            rest[number] = replace(
                bundle,
                slots=tuple(slot for i, slot in enumerate(bundle.slots) if i not in slots),
                cpu_milli=0,
                memory_bytes=0,
                adds=(),
                forbids=(),
                nodes=(),
            )
        self._rest = rest
        self.bundles = tuple(rest)

    def _is_pinned(self, part: MemberShare) -> bool:
        return (part.role, part.rank) in self._at

    def take_places(self, fleet: Fleet) -> tuple[list[int], dict[int, PlacedBundle]]:
        """The shapes of the nodes with the pinned members on them, and their places.

        Raises:
            PlacementError: a member cannot stay where it is.
        """
        shapes = list(fleet.start)
        taken: dict[int, PlacedBundle] = {}
        for number in self._slots:
            at = self._split.get(number, number)
            bundle = self.bundles[at]
            taken[at] = self._place(bundle, fleet)
            shapes[taken[at].node] = fleet.take(shapes[taken[at].node], bundle, taken[at].devices)
        for number, at in self._split.items():
            taken[number] = self._place_rest(self.bundles[number], fleet, taken[at].node, shapes)
        return shapes, taken

    def _place(self, bundle: Bundle, fleet: Fleet) -> PlacedBundle:
        nodes = {node.node_rank: i for i, node in enumerate(fleet.nodes)}
        found: int | None = None
        devices: list[tuple[int, ...]] = []
        for slot in bundle.slots:
            part = next(part for part in slot.parts if self._is_pinned(part))
            placement = self._at[part.role, part.rank]
            position = nodes.get(placement.node_rank)
            if position is None or found not in (None, position):
                raise PlacementError(
                    f"{part.role}:{part.rank} is to stay on node {placement.node_rank}, which is not among those that "
                    "may be used, or not where its group is: let it be placed anew"
                )
            found = position
            places = {device.uuid: i for i, device in enumerate(fleet.devices[position])}
            uuids = [share.device.uuid for share in placement.devices]
            if part.count:
                uuids = self._uuids_of_pool(slot.parts, slot.devices, places, placement.node_rank)
            if missing := [uuid for uuid in uuids if uuid not in places]:
                raise PlacementError(
                    f"{part.role}:{part.rank} is to stay on device {missing[0]}, which may not be used: let it be "
                    "placed anew"
                )
            devices.append(tuple(places[uuid] for uuid in uuids))
        assert found is not None
        return PlacedBundle(found, tuple(devices))

    def _uuids_of_pool(self, parts: Sequence[MemberShare], size: int, there: Iterable[str], node: int) -> list[str]:
        """The devices of a pool's part on a node, in order; members that are placed anew get the first devices
        that no pinned member has."""
        uuids = [""] * size
        for part in parts:
            if self._is_pinned(part):
                shares = self._at[part.role, part.rank].devices
                uuids[part.first : part.first + part.count] = [share.device.uuid for share in shares]
        here = [placement for placement in self._at.values() if placement.node_rank == node]
        had = {share.device.uuid for placement in here for share in placement.devices}
        free = iter([uuid for uuid in there if uuid not in had])
        return [uuid or next(free, "(none is free)") for uuid in uuids]

    def _place_rest(self, bundle: Bundle, fleet: Fleet, node: int, shapes: list[int]) -> PlacedBundle:
        moves = fleet.moves(bundle, fleet.kind(bundle), shapes[node])
        if not moves:
            names = ", ".join(f"{part.role}:{part.rank}" for part in bundle.parts)
            raise PlacementError(
                f"{names}: must be on node {fleet.nodes[node].name}, where members of the same group stay, and "
                "there is no room: let the whole group be placed anew"
            )
        shapes[node] = moves[0].after
        return PlacedBundle(node, moves[0].devices)

    def join(self, taken: Mapping[int, PlacedBundle]) -> dict[int, PlacedBundle]:
        """The places of the whole bundles."""
        joined = {number: taken[number] for number in range(len(self.whole))}
        for number, at in self._split.items():
            stays = dict(zip(self._slots[number], taken[at].devices, strict=True))
            others = iter(taken[number].devices)
            slots = range(len(self.whole[number].slots))
            joined[number] = PlacedBundle(
                taken[at].node, tuple(stays[i] if i in stays else next(others) for i in slots)
            )
        return joined
