"""Free resources of nodes, and the ways in which a bundle fits into a node. No I/O; fast for many equal nodes.

Nodes with the same free devices, cores and so on have the same *shape*, a number; the effect of a kind of bundle
on a shape is computed once. Shapes that differ only in the order of their devices are *alike*: the same bundles
fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlmesh.placement.bundles import Bundle, BundleLayout, Slot
from rlmesh.placement.demand import WHOLE
from rlmesh.placement.machine.inventory import MIG, Device, NodeInfo
from rlmesh.placement.topology import close_devices

MOST_MOVES = 64
"""Most ways of fitting a bundle into a shape that are distinguished."""


_Fit: TypeAlias = tuple[tuple[tuple[int, ...], ...], list[int], list[frozenset[str]]]
"""The devices of each slot, then the free share and the labels of each device."""


@dataclass(frozen=True, slots=True)
class Move:
    """One way to put a bundle on a node: the node's shape afterwards, and each slot's devices by position."""

    after: int
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Template:
    """The constant properties of a node. ``pinned``: for each set of node names to which roles are restricted
    (``on_nodes``), True if this node is in the set."""

    devices: tuple[tuple[str, str, str, int | None], ...]
    links: tuple[tuple[int, ...], ...]
    cores: int
    pinned: tuple[bool, ...]
    chosen: tuple[tuple[bool, ...], ...]
    """For each set of device selectors, True for each device that it names."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Free resources of a node. ``labels`` are those of each device, ``held`` those of the node with their counts;
    cores and memory may fall below 0 where they are soft."""

    template: int
    free: tuple[int, ...]
    labels: tuple[frozenset[str], ...]
    cpu_milli: int
    memory_bytes: int
    held: tuple[tuple[str, int], ...]
    members: int


class Fleet:
    """The nodes of one planning run: their shapes, and how bundles change them.

    Args:
        nodes: the nodes in the order of preference.
        devices: the usable devices of each node.
        soft: True if cores and memory may be overdrawn.
    """

    def __init__(
        self, nodes: Sequence[NodeInfo], devices: Sequence[Sequence[Device]], layout: BundleLayout, *, soft: bool
    ) -> None:
        self.nodes = tuple(nodes)
        self.devices = tuple(tuple(each) for each in devices)
        self.soft = soft
        self.limits: dict[str, int] = dict(layout.limits)
        self._pins = list(dict.fromkeys(pin for bundle in layout.bundles for pin in bundle.nodes))
        self._selectors = list(dict.fromkeys(o for bundle in layout.bundles for s in bundle.slots for o in s.only))
        self.shapes: list[Shape] = []
        self._numbers: dict[Shape, int] = {}
        self._templates: list[Template] = []
        self._template_numbers: dict[Template, int] = {}
        self._alike: dict[tuple[object, ...], int] = {}
        self.alike: list[int] = []
        """For each shape a number that is equal for alike shapes."""
        self._kinds: dict[tuple[object, ...], int] = {}
        self._moves: dict[tuple[int, int], tuple[Move, ...]] = {}
        self.start = [self._fresh(i) for i in range(len(self.nodes))]
        """The shape of each node before anything is placed."""

    def kind(self, bundle: Bundle) -> int:
        """A number that is equal for bundles with the same demand."""
        return self._kinds.setdefault(bundle.kind, len(self._kinds))

    def moves(self, bundle: Bundle, kind: int, shape: int) -> tuple[Move, ...]:
        """The ways to put a bundle on a node of a shape, best first; empty if it does not fit."""
        found = self._moves.get((kind, shape))
        if found is None:
            found = self._moves[kind, shape] = self._compute_moves(bundle, self.shapes[shape])
        return found

    def forget_moves(self) -> None:
        """Clear the cache of moves; call after a change of ``limits``."""
        self._moves.clear()

    def free_milli(self, shape: int) -> int:
        return sum(self.shapes[shape].free)

    def crowd(self, shape: int) -> float:
        """The load of a node: used cores, at least half a core per member, divided by the node's cores."""
        found = self.shapes[shape]
        cores = max(1, self._templates[found.template].cores)
        return max(found.members / 2, cores - found.cpu_milli / WHOLE) / cores

    def take(self, shape: int, bundle: Bundle, devices: Sequence[Sequence[int]]) -> int:
        """The shape after a bundle took the given devices, whether that is allowed or not."""
        found = self.shapes[shape]
        free, labels = list(found.free), list(found.labels)
        for slot, positions in zip(bundle.slots, devices, strict=True):
            for i in positions:
                free[i] -= slot.share_milli
                labels[i] |= slot.labels
        return self._after(found, bundle, free, labels)

    def blocker(self, bundle: Bundle, shape: int) -> str:
        """The obstacle, other than room, to a bundle on a node; empty if there is none."""
        found = self.shapes[shape]
        template = self._templates[found.template]
        if any(not template.pinned[self._pins.index(pin)] for pin in bundle.nodes):
            return "not one of its nodes"
        held = dict(found.held)
        for label in bundle.forbids:
            if held.get(label):
                return f"{label.split()[-1]} is there"
        for label, count in bundle.adds:
            if label in self.limits and held.get(label, 0) + count > self.limits[label]:
                return f"at most {self.limits[label]} on a node"
        return ""

    # Shapes

    def _fresh(self, position: int) -> int:
        node, devices = self.nodes[position], self.devices[position]
        place = {device.uuid: i for i, device in enumerate(devices)}
        links = [[0] * len(devices) for _ in devices]
        for i, device in enumerate(devices):
            for uuid, count in device.links:
                if (j := place.get(uuid)) is not None:
                    links[i][j] = links[j][i] = max(count, links[i][j])
        template = Template(
            tuple((d.kind, d.model, d.parent, d.numa) for d in devices),
            tuple(map(tuple, links)),
            node.cpus,
            tuple(node.name in pin for pin in self._pins),
            tuple(tuple(any(names(s, d) for s in chosen) for d in devices) for chosen in self._selectors),
        )
        number = self._template_numbers.setdefault(template, len(self._templates))
        if number == len(self._templates):
            self._templates.append(template)
        none: frozenset[str] = frozenset()
        count = len(devices)
        cores = node.cpus * WHOLE
        return self._number(Shape(number, (WHOLE,) * count, (none,) * count, cores, node.memory_bytes, (), 0))

    def _number(self, shape: Shape) -> int:
        number = self._numbers.get(shape)
        if number is None:
            number = self._numbers[shape] = len(self.shapes)
            self.shapes.append(shape)
            self.alike.append(self._alike.setdefault(self._likeness(shape), len(self._alike)))
        return number

    def _likeness(self, shape: Shape) -> tuple[object, ...]:
        template = self._templates[shape.template]
        devices = sorted(
            (free, tuple(sorted(labels)), template.devices[i][0] == MIG, tuple(row[i] for row in template.chosen))
            for i, (free, labels) in enumerate(zip(shape.free, shape.labels, strict=True))
        )
        room = () if self.soft else (shape.cpu_milli, shape.memory_bytes)
        return (tuple(devices), room, shape.held, template.pinned)

    # Moves

    def _compute_moves(self, bundle: Bundle, shape: Shape) -> tuple[Move, ...]:
        if not self.soft and (bundle.cpu_milli > shape.cpu_milli or bundle.memory_bytes > shape.memory_bytes):
            return ()
        if self.blocker(bundle, self._numbers[shape]):
            return ()
        found: dict[int, Move] = {}
        for devices, free, labels in self._fits(bundle, shape):
            after = self._after(shape, bundle, free, labels)
            found.setdefault(self.alike[after], Move(after, devices))
            if len(found) == MOST_MOVES:
                break
        return tuple(found.values())

    def _after(self, shape: Shape, bundle: Bundle, free: Sequence[int], labels: Sequence[frozenset[str]]) -> int:
        held = dict(shape.held)
        for label, count in bundle.adds:
            held[label] = held.get(label, 0) + count
        members = shape.members + sum(len(slot.parts) for slot in bundle.slots)
        return self._number(
            Shape(
                shape.template, tuple(free), tuple(labels), shape.cpu_milli - bundle.cpu_milli,
                shape.memory_bytes - bundle.memory_bytes, tuple(sorted(held.items())), members,
            )
        )  # fmt: skip

    def _fits(self, bundle: Bundle, shape: Shape) -> list[_Fit]:
        """Choices of devices for all slots, best first; no two that lead to alike nodes."""
        partial: list[_Fit] = [((), list(shape.free), list(shape.labels))]
        joint = self._joint_choice(bundle, shape)
        for number, slot in enumerate(bundle.slots):
            after: list[_Fit] = []
            for devices, free, labels in partial:
                choices = [joint[number]] if joint is not None else self._choices(slot, shape.template, free, labels)
                for positions in choices:
                    new_free, new_labels = list(free), list(labels)
                    for i in positions:
                        new_free[i] -= slot.share_milli
                        new_labels[i] |= slot.labels
                    after.append(((*devices, positions), new_free, new_labels))
            partial = self._distinct(shape.template, after)
        return partial

    def _allowed(
        self, slot: Slot, template: Template, free: Sequence[int], labels: Sequence[frozenset[str]]
    ) -> list[int]:
        chosen = [template.chosen[self._selectors.index(only)] for only in slot.only]
        return [
            i
            for i, room in enumerate(free)
            if room >= slot.share_milli
            and not (slot.forbids and slot.forbids & labels[i])
            and all(row[i] for row in chosen)
            and not (slot.devices > 1 and template.devices[i][0] == MIG)  # CUDA shows a process only one slice
        ]

    def _distinct(self, template: int, fits: list[_Fit]) -> list[_Fit]:
        """The first of each set of alike fits."""
        if len(fits) < 2:
            return fits
        found: dict[tuple[object, ...], _Fit] = {}
        for fit in fits:
            found.setdefault(self._likeness(Shape(template, tuple(fit[1]), tuple(fit[2]), 0, 0, (), 0)), fit)
        return list(found.values())[:MOST_MOVES]

    def _choices(
        self, slot: Slot, template_number: int, free: Sequence[int], labels: Sequence[frozenset[str]]
    ) -> list[tuple[int, ...]]:
        """Choices of devices for one slot: the fullest with enough room first, then the lowest index."""
        if slot.devices == 0:
            return [()]
        template = self._templates[template_number]
        allowed = self._allowed(slot, template, free, labels)
        if len(allowed) < slot.devices:
            return []
        if slot.devices > 1:
            numa = [device[3] for device in template.devices]
            return [
                close_devices(among, slot.devices, template.links, numa)
                for among in _mixtures(self._classes(allowed, template), slot.devices)
            ]
        allowed.sort(key=lambda i: (free[i], template.devices[i][0] == MIG, i))
        # Of alike devices the first is enough.
        alike = {(free[i], labels[i], template.devices[i][0] == MIG, *(row[i] for row in template.chosen)): i
                 for i in reversed(allowed)}  # fmt: skip
        return [(i,) for i in reversed(alike.values())]

    def _classes(self, allowed: Sequence[int], template: Template) -> list[list[int]]:
        """Devices grouped by the selectors that name them."""
        classes: dict[tuple[bool, ...], list[int]] = {}
        for i in allowed:
            classes.setdefault(tuple(row[i] for row in template.chosen), []).append(i)
        return list(classes.values())

    def _joint_choice(self, bundle: Bundle, shape: Shape) -> list[tuple[int, ...]] | None:
        """Whole devices for all slots at once, so that they are close to each other; None if slots share
        devices or differ in the devices that they may use."""
        first = bundle.slots[0]
        if len(bundle.slots) == 1 or first.devices == 0 or any(s.shape != first.shape for s in bundle.slots):
            return None
        template = self._templates[shape.template]
        if first.share_milli != WHOLE or first.labels or any(d[0] == MIG for d in template.devices):
            return None
        allowed = self._allowed(first, template, shape.free, shape.labels)
        wanted = first.devices * len(bundle.slots)
        if len(allowed) < wanted or len(self._classes(allowed, template)) > 1:
            return None
        devices = close_devices(allowed, wanted, template.links, [d[3] for d in template.devices])
        return [tuple(devices[i : i + first.devices]) for i in range(0, wanted, first.devices)]


def _mixtures(classes: Sequence[Sequence[int]], wanted: int) -> Iterator[list[int]]:
    """All ways to choose ``wanted`` devices as counts per class. If one class has all of them, the choice within the
    class is left open."""
    if len(classes) == 1:
        yield list(classes[0])
        return
    head, *rest = classes
    room = sum(map(len, rest))
    for count in range(max(0, wanted - room), min(len(head), wanted) + 1):
        if count == wanted:
            yield list(head)
        else:
            yield from ([*head[:count], *other] for other in _mixtures(rest, wanted - count))


def names(selector: str, device: Device) -> bool:
    """True if a selector (UUID or its beginning, kind, or part of the model) names a device."""
    text = selector.lower()
    return device.uuid.lower().startswith(text) or device.kind == text or text in device.model.lower()


def count_alike(fleet: Fleet, shapes: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Shapes with the number of nodes of each, equal for alike sets of nodes."""
    counts: dict[int, int] = {}
    for shape, count in shapes.items():
        if count:
            counts[fleet.alike[shape]] = counts.get(fleet.alike[shape], 0) + count
    return tuple(sorted(counts.items()))
