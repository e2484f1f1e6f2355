"""`SampleBuffer`: the groups between sampling and training, and the rules for the order in which they are sampled and
trained. No I/O, no threads.

The prompts of a run form one endless sequence of positions, which seed and epoch determine. Each position has one slot,
which is freed only when its group is trained, dropped or failed::

    drawn → sampling → sampled → trained
                                 dropped   all responses have the same reward, and others are drawn instead
                                 failed    no response has a reward, or the prompt kills engines or scorers

**Order.** A step trains on the first ``batch_size`` slots in drawing order that are neither dropped nor failed. It
waits for slow groups, so the length of an answer does not influence whether, or how often, its prompt is trained.

**Staleness.** The place of a slot in the order gives the latest step that can train it; dropped slots before it only
make this step earlier. A slot may be requested only if it is within the staleness bound in its latest step. `take`
checks the bound again.

**Back-pressure.** Thereby the bound also limits the number of slots: engines wait when no further slot may be
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from rlmesh.rl.types import Group

__all__ = ["GroupSlot", "SampleBuffer", "SlotState"]

SlotState = Literal["drawn", "sampling", "sampled", "trained", "dropped", "failed"]


@dataclass(slots=True, eq=False)
class GroupSlot:
    """The place of one prompt's group.

    Attributes:
        position: position in the sequence of prompts.
        key: (epoch, index of the prompt in the data).
        state: see the module.
        step: the step that trains the group, or for which it was dropped or failed.
        versions: oldest and newest version that sampled a token; None before sampling.
        asked: number of requests to engines for the group.
        deaths: number of engines that died while they sampled the group.
        suspect: number of the crash that the group may have caused; 0: none. A suspect is sampled alone.
        scored: True if the group has the outcomes of its rewards.
        reason: the reason for the last change, for people.
        group: the responses.
    """

    position: int
    key: tuple[int, int]
    state: SlotState = "drawn"
    step: int | None = None
    versions: tuple[int, int] | None = None
    asked: int = 0
    deaths: int = 0
    suspect: int = 0
    scored: bool = False
    reason: str = ""
    group: Group | None = field(default=None, repr=False)

    @property
    def ready(self) -> bool:
        """True if the group may be trained."""
        return self.state == "sampled" and self.scored

    @property
    def title(self) -> str:
        """The group's prompt, for messages."""
        epoch, index = self.key
        return f"the prompt at position {self.position} (epoch {epoch}, prompt {index} of the data)"


class SampleBuffer:
    """The slots of a run from drawing to training; see the module. Not thread-safe.

    Args:
        batch_size: groups per step.
        staleness: the largest staleness of a group when it is trained (`rlmesh.rl.rollout.pipeline.Pipeline`).
        steps: number of steps of the run; nothing is drawn for later steps.
        extra: number of slots that may be requested beyond the bound, as replacements for dropped groups. They are
            scored only when they are needed, and requested again if they are too old then.
        refill: at most ``refill * batch_size`` groups are dropped per step; further ones are kept.
        record: called with each slot after each change of its state.
    """

    def __init__(
        self, batch_size: int, staleness: int, steps: int, *, extra: int = 0, refill: float = 0.0,
        record: Callable[[GroupSlot], object] = lambda slot: None,
    ) -> None:  # fmt: skip
        self.batch_size, self.staleness, self.steps, self.extra = batch_size, staleness, steps, extra
        self._most_dropped = int(refill * batch_size)
        self._record = record
        self._live: dict[int, GroupSlot] = {}
        self._taken: list[GroupSlot] = []
        self._lost: dict[tuple[int, str], int] = {}
        self.deaths: dict[int, int] = {}
        """Deaths of engines by position, until the group is sampled. A return to a checkpoint does not reset them."""
        self.suspects: dict[int, int] = {}
        """`GroupSlot.suspect` by position, kept like ``deaths``."""
        self.poison: dict[int, str] = {}
        """Positions whose prompts kill engines or scorers, with the reasons. Their slots fail when they are drawn."""
        self.cursor = 0
        """The next position to draw."""
        self.step = 1
        """The next step to take."""
        self.version: int | None = None
        """The version that the engines serve; None: none."""
        self.renewed = 0
        """The number of groups that `take` found too old."""

    # Drawing and sampling.

    @property
    def waiting(self) -> Sequence[GroupSlot]:
        """The slots that no step has taken, in drawing order."""
        return list(self._live.values())

    @property
    def taken(self) -> Sequence[GroupSlot]:
        """The slots of the step that is being trained."""
        return tuple(self._taken)

    @property
    def window(self) -> int:
        """The number of waiting slots that may be requested now."""
        if self.version is None:
            return 0
        within = self.batch_size * (self.version + self.staleness + 2 - self.step)
        return max(0, min(within + self.extra, self.batch_size * (self.steps - self.step + 1)))

    @property
    def room(self) -> int:
        """The number of slots that may be drawn now."""
        return max(0, self.window - len(self._live))

    def draw(self, key_of: Callable[[int], tuple[int, int]]) -> list[GroupSlot]:
        """Fill the window with new slots, and return these.

        Args:
            key_of: function from a position to (epoch, index of the prompt).
        """
        new = []
        while self.room:
            slot = GroupSlot(self.cursor, key_of(self.cursor))
            self._remember_deaths(slot)
            self._live[slot.position] = slot
            self.cursor += 1
            new.append(slot)
            self._record(slot)
            self._fail_poison(slot)
        return new

    def _remember_deaths(self, slot: GroupSlot) -> None:
        slot.deaths, slot.suspect = self.deaths.get(slot.position, 0), self.suspects.get(slot.position, 0)

    def _fail_poison(self, slot: GroupSlot) -> None:
        if slot.position in self.poison:
            self._lose(slot, "failed", self.poison[slot.position])

    def askable(self) -> list[GroupSlot]:
        """The slots that may be requested from an engine now, in drawing order."""
        return [slot for slot in islice(self._live.values(), self.window) if slot.state == "drawn"]

    def target(self, slot: GroupSlot) -> int:
        """The latest step that can train a waiting slot: the step that does if no slot before it is dropped or
        fails."""
        place = next(number for number, one in enumerate(self._live.values()) if one is slot)
        return self.step + place // self.batch_size

    def ask(self, slot: GroupSlot) -> None:
        """Note that an engine samples the group."""
        slot.asked += 1
        self._change(slot, "sampling")

    def ask_again(self, slot: GroupSlot, reason: str, *, died: bool = False, suspect: int = 0) -> None:
        """Note that the group must be sampled again.

        Args:
            reason: the reason, for people.
            died: True if an engine died while it sampled the group.
            suspect: number of the crash that the group may have caused; 0: none.
        """
        if died:
            self.deaths[slot.position] = self.deaths.get(slot.position, 0) + 1
        # Deaths before its last responses do not count: after a resume, the ledger's number would make it a suspect.
        slot.deaths = self.deaths.get(slot.position, 0)
        if suspect:
            slot.suspect = self.suspects[slot.position] = suspect
        slot.group, slot.versions, slot.scored = None, None, False
        self._change(slot, "drawn", reason)

    def sampled(self, slot: GroupSlot, group: Group) -> None:
        """Note that the group has its responses, which have no rewards yet."""
        slot.group, slot.versions = group, _versions_of(group, self.version)
        self._clear(slot)
        self._change(slot, "sampled", "")

    def _clear(self, slot: GroupSlot) -> None:
        slot.suspect = 0
        self.deaths.pop(slot.position, None)
        self.suspects.pop(slot.position, None)

    def scored(self, slot: GroupSlot, group: Group) -> None:
        """Note that the group has its rewards."""
        slot.group, slot.scored = group, True

    def fail(self, slot: GroupSlot, reason: str, *, poison: bool = False) -> int:
        """Free the slot of a group that can never be trained; returns the number of groups that failed for its step.

        Args:
            reason: the reason, for people.
            poison: True if its prompt kills engines or scorers: it is never requested again, and other suspects of the
                same crash are cleared.
        """
        if poison:
            self.poison[slot.position] = reason
            if slot.suspect:
                self._acquit(slot.suspect)
        return self._lose(slot, "failed", reason)

    def _acquit(self, crash: int) -> None:
        self.suspects = {position: one for position, one in self.suspects.items() if one != crash}
        for slot in self._live.values():
            if slot.suspect == crash:
                self._clear(slot)

    def drop(self, slot: GroupSlot, reason: str) -> bool:
        """Free the slot of a group that is not worth training. If too many were dropped, keep the group and return
        False."""
        if self._lost.get((self.target(slot), "dropped"), 0) >= self._most_dropped:
            return False
        self._lose(slot, "dropped", reason)
        return True

    def _lose(self, slot: GroupSlot, state: Literal["dropped", "failed"], reason: str) -> int:
        slot.step = self.target(slot)
        count = self._lost[slot.step, state] = self._lost.get((slot.step, state), 0) + 1
        del self._live[slot.position]
        self._change(slot, state, reason)
        return count

    # Training.

    def take(self, step: int) -> list[GroupSlot] | None:
        """Take the slots of a step, in drawing order. None: some are not ready, or are too old and must be sampled
        again.

        Raises:
            ValueError: it is another step's turn.
        """
        if step != self.step or self._taken:
            raise ValueError(f"step {step} cannot take its groups: it is the turn of step {self.step}")
        first = list(islice(self._live.values(), self.batch_size))
        for slot in first:
            # This includes unscored slots: they were being sampled at the last `advance`, and too old slots are not
            # scored.
            if slot.state == "sampled" and self._is_too_old(slot, step):
                self.renewed += 1
                self.ask_again(slot, f"too old for step {step}: version {slot.versions}")
        if len(first) < self.batch_size or not all(slot.ready for slot in first):
            return None
        for slot in first:
            slot.step = step
            del self._live[slot.position]
            self._record(slot)
        self._taken, self.step = first, step + 1
        self._lost = {key: count for key, count in self._lost.items() if key[0] > step}
        return first

    @property
    def batch_ready(self) -> bool:
        """True if the next step can take its groups."""
        first = list(islice(self._live.values(), self.batch_size))
        return len(first) == self.batch_size and all(
            one.ready and not self._is_too_old(one, self.step) for one in first
        )

    @property
    def lacks_scores_only(self) -> bool:
        """True if the groups of the next step are all sampled, and some wait for their rewards."""
        first = list(islice(self._live.values(), self.batch_size))
        sampled = len(first) == self.batch_size and all(slot.state == "sampled" for slot in first)
        return sampled and not all(slot.scored for slot in first)

    def unscored(self, *, in_order: bool = False) -> list[GroupSlot]:
        """The slots that are sampled and not scored, in drawing order. Slots that are too old for the step of their
        place are left out: their rewards must not influence what this step trains on.

        Args:
            in_order: only slots before the first one that is not sampled. The order of scoring decides which groups are
                dropped.
        """
        found = []
        for place, slot in enumerate(self._live.values()):
            if in_order and slot.state != "sampled":
                break
            too_old = self._is_too_old(slot, self.step + place // self.batch_size)
            if slot.state == "sampled" and not slot.scored and not too_old:
                found.append(slot)
        return found

    def _is_too_old(self, slot: GroupSlot, step: int) -> bool:
        return slot.versions is not None and step - 1 - slot.versions[0] > self.staleness

    def trained(self, step: int) -> None:
        """Free the slots of a step that is trained."""
        if self._taken and self._taken[0].step != step:
            raise ValueError(f"step {step} has no groups; step {self._taken[0].step} has")
        taken, self._taken = self._taken, []
        for slot in taken:
            slot.group = None
            self._change(slot, "trained", "")

    def advance(self, version: int) -> None:
        """Note the version that the engines serve now. Groups that would be too old in their step are sampled again."""
        self.version = version
        for place, slot in enumerate(self._live.values()):
            if slot.state == "sampled" and self._is_too_old(slot, self.step + place // self.batch_size):
                self.ask_again(slot, f"too old for its step: version {slot.versions}")

    # Resuming.

    def state(self, *, scored_only: bool = False) -> dict[str, Any]:
        """The state for a checkpoint: plain values, and `Group` objects.

        Call this between steps: slots that are in training are not part of the state.

        Args:
            scored_only: leave out groups without rewards, which are then sampled anew. If some groups of a round were
                scored before the others, other groups might be dropped.
        """
        kept = ("position", "key", "asked")

        def stays(slot: GroupSlot) -> bool:
            return slot.state == "sampled" and (slot.scored or not scored_only)

        return {
            "cursor": self.cursor,
            "step": self.step,
            "lost": [[step, why, count] for (step, why), count in self._lost.items()],
            "slots": [
                {name: getattr(slot, name) for name in kept}
                | ({"group": slot.group, "scored": slot.scored} if stays(slot) else {})
                for slot in self._live.values()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a saved state. Groups that were being sampled at that time are sampled anew. The engines' version
        is unknown until `advance`."""
        self.cursor, self.step, self.version = state["cursor"], state["step"], None
        self._taken = []
        self._lost = {(step, why): count for step, why, count in state.get("lost", ())}
        self._live = {}
        for saved in state["slots"]:
            slot = GroupSlot(saved["position"], tuple(saved["key"]), asked=saved["asked"])
            self._remember_deaths(slot)
            self._live[slot.position] = slot
            if (group := saved.get("group")) is not None:
                slot.group, slot.versions, slot.scored = group, _versions_of(group, None), saved["scored"]
                slot.state = "sampled"
            self._record(slot)
            self._fail_poison(slot)

    def counts(self) -> dict[str, int]:
        """The number of waiting slots in each state, and of slots that are ready."""
        found = dict.fromkeys(("drawn", "sampling", "sampled"), 0)
        for slot in self._live.values():
            found[slot.state] += 1
        return found | {"ready": sum(slot.ready for slot in self._live.values())}

    def described(self) -> str:
        """A text for people about the numbers of `counts`."""
        counts = self.counts()
        ready = counts.pop("ready")
        return ", ".join(f"{count} {name}" for name, count in counts.items()) + f" ({ready} of them ready)"

    def __iter__(self) -> Iterator[GroupSlot]:
        return iter(list(self._live.values()))

    def _change(self, slot: GroupSlot, state: SlotState, reason: str | None = None) -> None:
        slot.state = state
        if reason is not None:
            slot.reason = reason
        self._record(slot)


def _versions_of(group: Group, unknown: int | None) -> tuple[int, int] | None:
    """The oldest and newest version of any token of a group; responses without tokens count as ``unknown``."""
    found = {version for episode in group.episodes for version in episode.versions}
    if not found:
        return None if unknown is None else (unknown, unknown)
    return min(found), max(found)
