"""`Recording`: the turns of an episode with their token ids, as a tree: a request with a changed history opens a
branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rlmesh.rl.engines.rollout import Sample
from rlmesh.rl.types import Episode, Ids, Turn

__all__ = ["RecordedTurn", "Recording"]

CUT_OFF = ("length", "time")


@dataclass(eq=False)
class RecordedTurn:
    """A turn of the policy, with everything before it.

    Attributes:
        said: the conversation up to the end of this turn in the client's form: a text, a tuple of token ids, or a list
            of messages. A request that begins with it continues this turn.
        turns: all turns from the beginning of the episode.
        ids: the token ids of ``turns``.
        answers: number of turns that follow this one directly, including turns that are being sampled.
        depth: number of turns of the policy, including this one.
        finish_reason: the reason for the end of this turn.
        end: the text that ended this turn, a stop text or that of an end token. It is in ``ids``, but not in ``said``;
            ``""``: none.
        rest: the text of this turn from ``end`` on: the last token may have more characters.
        tools: schemas of the tools in the prompt.
    """

    said: Any
    turns: tuple[Turn, ...] = ()
    ids: list[int] = field(default_factory=list)
    answers: int = 0
    depth: int = 0
    finish_reason: str = "stop"
    end: str = ""
    rest: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()

    def unrepeated(self, text: str) -> str:
        """A text that follows this turn, without the end that its ids have already: a client does not get the end of a
        turn, and writes it itself if its format needs it."""
        if not self.end or not text.startswith(self.end):
            return text
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self.rest, text, strict=False))
        return text[sum(1 for _ in same) :]


class Recording:
    """The turns of one episode."""

    def __init__(self) -> None:
        self.root = RecordedTurn(None)
        self._turns: list[RecordedTurn] = []
        self._parents: dict[RecordedTurn, RecordedTurn] = {}

    def __len__(self) -> int:
        """The number of turns of the policy."""
        return len(self._turns)

    def find(self, given: Any) -> RecordedTurn:
        """The last recorded turn that a request continues; the root if it continues none.

        Args:
            given: the whole conversation, in one of the forms of `RecordedTurn.said`.
        """
        found = self.root
        for turn in self._turns:
            said = turn.said
            if type(said) is type(given) and turn.depth > found.depth and given[: len(said)] == said:
                found = turn
        return found

    def add(self, parent: RecordedTurn, before: Sequence[int], sample: Sample, said: Any) -> RecordedTurn:
        """Record a turn of the policy.

        Args:
            parent: the turn before it, or the root.
            before: the environment's token ids between the two.
            sample: the engine's sample.
            said: the conversation after the turn, see `RecordedTurn`.

        Raises:
            ValueError: the sample continues other tokens than the recorded ones.
        """
        ids = [*parent.ids, *before]
        if sample.prompt_token_ids != ids:
            raise ValueError("the engine continued other tokens than the episode has")
        turns = [*parent.turns, *([Turn.said(before)] if before else ()), Turn.sampled(sample)]
        made = RecordedTurn(
            said, tuple(turns), [*ids, *sample.token_ids], depth=parent.depth + 1, finish_reason=sample.finish_reason
        )
        self._turns.append(made)
        self._parents[made] = parent
        return made

    def last_turns(self) -> list[RecordedTurn]:
        """The last turn of each branch, in the order of recording."""
        inner = set(self._parents.values())
        return [turn for turn in self._turns if turn not in inner]

    def _cut_off(self, last: RecordedTurn) -> dict[str, str]:
        """The limits of tokens or time that ended turns of a branch, by the turn's number."""
        found, turn = {}, last
        while turn is not self.root:
            if turn.finish_reason in CUT_OFF:
                found[str(turn.depth)] = turn.finish_reason
            turn = self._parents[turn]
        return dict(reversed(found.items()))

    def episodes(
        self, prompt: Ids, extras: Mapping[str, Any], *, finish_reason: str = "", failure: str = ""
    ) -> list[Episode]:
        """One episode per branch, at least one. If several branches have a turn of the policy, it counts as the
        policy's in the first of them and as the environment's in the others, so that it is trained on once.

        Args:
            prompt: the prompt, for an episode without any turn of the policy.
            extras: the extras of all episodes.
            finish_reason: the reason for the end; ``""``: that of the last turn.
            failure: the reason why the episode failed; ``""``: it did not fail.
        """
        taken: set[int] = set()
        made = []
        for number, last in enumerate(self.last_turns()):
            turns = []
            for turn in last.turns:
                turns.append(Turn.said(turn.ids) if id(turn) in taken else turn)
                taken.add(id(turn))
            own = {**extras, "turns": last.depth, **({"branch": number} if number else {})}
            if cut := self._cut_off(last):
                own["cut_off"] = cut
            if isinstance(last.said, list):
                own["messages"] = last.said
            made.append(Episode(tuple(turns), finish_reason or last.finish_reason, extras=own, failure=failure))
        if made:
            return made
        empty = {**extras, "turns": 0}
        return [Episode((Turn.said(prompt),), finish_reason or "stop", extras=empty, failure=failure)]
