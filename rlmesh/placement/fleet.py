"""What is still free on nodes, and the ways in which a chunk fits into one. Pure, and quick for many nodes alike.

Nodes with the same free devices, cores and so on have the same *shape*, a number; what a chunk of a kind does
to a shape is worked out once. Shapes that differ only in which of their devices is which are *alike*: the same
chunks fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlmesh.placement.bundles import BundleLayout, Chunk, Slot
from rlmesh.placement.demand import WHOLE
from rlmesh.placement.machine.inventory import MIG, Device, NodeInfo
from rlmesh.placement.topology import close_devices

MOVES_KEPT = 64
"""Most ways of fitting a chunk into a shape that are told apart."""


_Fit: TypeAlias = tuple[tuple[tuple[int, ...], ...], list[int], list[frozenset[str]]]
"""Each slot's devices, then what is free of each device, and its labels."""


@dataclass(frozen=True, slots=True)
class Move:
    """One way to put a chunk on a node: the shape that the node has then, and each slot's devices by position."""

    after: int
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Template:
    """What does not change about a node. ``pinned`` says for each set of node names that roles are bound to
    whether this node is in it."""

    devices: tuple[tuple[str, str, str, int | None], ...]
    links: tuple[tuple[int, ...], ...]
    cores: int
    pinned: tuple[bool, ...]
    chosen: tuple[tuple[bool, ...], ...]
    """Of each set of device selectors, which devices it names."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is free. ``labels`` are those of each device, ``held`` those of the node with their counts; cores and
    memory may fall below 0 where they are soft."""

    template: int
    free: tuple[int, ...]
    labels: tuple[frozenset[str], ...]
    cpu_milli: int
    memory_bytes: int
    held: tuple[tuple[str, int], ...]
    members: int


class Fleet:
    """The nodes of one planning: their shapes, and how chunks change them.

    Args:
        nodes: in the order of preference.
        devices: the usable devices of each.
        soft: whether cores and memory may be overdrawn.
    """

    def __init__(
        self, nodes: Sequence[NodeInfo], devices: Sequence[Sequence[Device]], layout: BundleLayout, *, soft: bool
    ) -> None:
        self.nodes = tuple(nodes)
        self.devices = tuple(tuple(each) for each in devices)
        self.soft = soft
        self.limits: dict[str, int] = dict(layout.limits)
        self._pins = list(dict.fromkeys(pin for chunk in layout.chunks for pin in chunk.nodes))
        self._selectors = list(dict.fromkeys(o for chunk in layout.chunks for s in chunk.slots for o in s.only))
        self.shapes: list[Shape] = []
        self._numbers: dict[Shape, int] = {}
        self._templates: list[Template] = []
        self._template_numbers: dict[Template, int] = {}
        self._alike: dict[tuple[object, ...], int] = {}
        self.alike: list[int] = []
        """For each shape a number that it has in common with those that are alike."""
        self._kinds: dict[tuple[object, ...], int] = {}
        self._moves: dict[tuple[int, int], tuple[Move, ...]] = {}
        self.start = [self._fresh(i) for i in range(len(self.nodes))]
        """The shape of each node before anything is placed."""

    def kind(self, chunk: Chunk) -> int:
        """A number that chunks which ask the same have in common."""
        return self._kinds.setdefault(chunk.kind, len(self._kinds))

    def moves(self, chunk: Chunk, kind: int, shape: int) -> tuple[Move, ...]:
        """The ways to put a chunk on a node of a shape, best first; empty if it does not fit."""
        found = self._moves.get((kind, shape))
        if found is None:
            found = self._moves[kind, shape] = self._work_out(chunk, self.shapes[shape])
        return found

    def forget_moves(self) -> None:
        """After ``limits`` were changed."""
        self._moves.clear()

    def free_milli(self, shape: int) -> int:
        return sum(self.shapes[shape].free)

    def crowd(self, shape: int) -> float:
        """How full a node is: cores taken, at least a half per member, over the cores there."""
        found = self.shapes[shape]
        cores = max(1, self._templates[found.template].cores)
        return max(found.members / 2, cores - found.cpu_milli / WHOLE) / cores

    def take(self, shape: int, chunk: Chunk, devices: Sequence[Sequence[int]]) -> int:
        """The shape after ``chunk`` took the given devices, whether that is allowed or not."""
        found = self.shapes[shape]
        free, labels = list(found.free), list(found.labels)
        for slot, positions in zip(chunk.slots, devices, strict=True):
            for i in positions:
                free[i] -= slot.share_milli
                labels[i] |= slot.labels
        return self._after(found, chunk, free, labels)

    def blocker(self, chunk: Chunk, shape: int) -> str:
        """What else than room keeps a chunk from a node; empty if nothing does."""
        found = self.shapes[shape]
        template = self._templates[found.template]
        if any(not template.pinned[self._pins.index(pin)] for pin in chunk.nodes):
            return "not one of its nodes"
        held = dict(found.held)
        for label in chunk.forbids:
            if held.get(label):
                return f"{label.split()[-1]} is there"
        for label, count in chunk.adds:
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

    def _work_out(self, chunk: Chunk, shape: Shape) -> tuple[Move, ...]:
        if not self.soft and (chunk.cpu_milli > shape.cpu_milli or chunk.memory_bytes > shape.memory_bytes):
            return ()
        if self.blocker(chunk, self._numbers[shape]):
            return ()
        found: dict[int, Move] = {}
        for devices, free, labels in self._fits(chunk, shape):
            after = self._after(shape, chunk, free, labels)
            found.setdefault(self.alike[after], Move(after, devices))
            if len(found) == MOVES_KEPT:
                break
        return tuple(found.values())

    def _after(self, shape: Shape, chunk: Chunk, free: Sequence[int], labels: Sequence[frozenset[str]]) -> int:
        held = dict(shape.held)
        for label, count in chunk.adds:
            held[label] = held.get(label, 0) + count
        members = shape.members + sum(len(slot.parts) for slot in chunk.slots)
        return self._number(
            Shape(
                shape.template, tuple(free), tuple(labels), shape.cpu_milli - chunk.cpu_milli,
                shape.memory_bytes - chunk.memory_bytes, tuple(sorted(held.items())), members,
            )
        )  # fmt: skip

    def _fits(self, chunk: Chunk, shape: Shape) -> list[_Fit]:
        """Choices of devices for all slots, best first; not two that lead to nodes that are alike."""
        partial: list[_Fit] = [((), list(shape.free), list(shape.labels))]
        joint = self._joint_choice(chunk, shape)
        for number, slot in enumerate(chunk.slots):
            after: list[_Fit] = []
            for devices, free, labels in partial:
                choices = [joint[number]] if joint is not None else self._choices(slot, shape.template, free, labels)
                for positions in choices:
                    new_free, new_labels = list(free), list(labels)
                    for i in positions:
                        new_free[i] -= slot.share_milli
                        new_labels[i] |= slot.labels
                    after.append(((*devices, positions), new_free, new_labels))
            partial = self._unlike(shape.template, after)
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
            and not (slot.devices > 1 and template.devices[i][0] == MIG)  # CUDA shows a process one slice only
        ]

    def _unlike(self, template: int, fits: list[_Fit]) -> list[_Fit]:
        """The first of those that are alike."""
        if len(fits) < 2:
            return fits
        found: dict[tuple[object, ...], _Fit] = {}
        for fit in fits:
            found.setdefault(self._likeness(Shape(template, tuple(fit[1]), tuple(fit[2]), 0, 0, (), 0)), fit)
        return list(found.values())[:MOVES_KEPT]

    def _choices(
        self, slot: Slot, template_number: int, free: Sequence[int], labels: Sequence[frozenset[str]]
    ) -> list[tuple[int, ...]]:
        """Devices for one slot: the fullest that still have room first, lowest index first."""
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
        # Of devices that are alike the first will do.
        alike = {(free[i], labels[i], template.devices[i][0] == MIG, *(row[i] for row in template.chosen)): i
                 for i in reversed(allowed)}  # fmt: skip
        return [(i,) for i in reversed(alike.values())]

    def _classes(self, allowed: Sequence[int], template: Template) -> list[list[int]]:
        """Devices by what roles may choose them for."""
        classes: dict[tuple[bool, ...], list[int]] = {}
        for i in allowed:
            classes.setdefault(tuple(row[i] for row in template.chosen), []).append(i)
        return list(classes.values())

    def _joint_choice(self, chunk: Chunk, shape: Shape) -> list[tuple[int, ...]] | None:
        """Whole devices for all slots at once, so that they are close to each other; None where slots share
        devices or differ in what they may use."""
        first = chunk.slots[0]
        if len(chunk.slots) == 1 or first.devices == 0 or any(s.shape != first.shape for s in chunk.slots):
            return None
        template = self._templates[shape.template]
        if first.share_milli != WHOLE or first.labels or any(d[0] == MIG for d in template.devices):
            return None
        allowed = self._allowed(first, template, shape.free, shape.labels)
        wanted = first.devices * len(chunk.slots)
        if len(allowed) < wanted or len(self._classes(allowed, template)) > 1:
            return None
        devices = close_devices(allowed, wanted, template.links, [d[3] for d in template.devices])
        return [tuple(devices[i : i + first.devices]) for i in range(0, wanted, first.devices)]


def _mixtures(classes: Sequence[Sequence[int]], wanted: int) -> Iterator[list[int]]:
    """Sets to choose ``wanted`` devices from: so many of each class, in all ways. Where one class has them all, the
    choice among them is left open."""
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
    """Whether a selector (UUID or its beginning, kind, or part of the model) names a device."""
    text = selector.lower()
    return device.uuid.lower().startswith(text) or device.kind == text or text in device.model.lower()


def count_alike(fleet: Fleet, shapes: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Shapes with how many nodes have each, the same for sets of nodes that are alike."""
    counts: dict[int, int] = {}
    for shape, count in shapes.items():
        if count:
            counts[fleet.alike[shape]] = counts.get(fleet.alike[shape], 0) + count
    return tuple(sorted(counts.items()))
