"""`TextEnvironment`: the partner of the policy in an episode, such as a game or a simulated user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from rlmesh.rl.data.chat import Message

__all__ = ["Said", "TextEnvironment", "TurnResult", "checked_said", "to_turn_result"]

Said = str | Sequence[Message] | Sequence[int] | None
"""The words of an environment: a text, chat messages, token ids (if ``tokens`` is True), or None for no words."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The answer of an environment to a turn of the policy.

    Attributes:
        said: a text, chat messages, or token ids; see `TextEnvironment`.
        reward: the reward of this turn. The episode's return is the sum over the turns.
        done: True if the episode is over; ``said`` is then ignored, since no turn follows.
    """

    said: Said = None
    reward: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.reward, bool) or not isfinite(self.reward):
            raise ValueError(f"the reward of a turn is a finite number, got {self.reward!r}")


class TextEnvironment(Protocol):
    """An environment of messages or tokens. A class with these methods is enough; it need not inherit from this one.

    An object is made for each episode, without arguments, and its methods are called on one thread of its own. They may
    be ``async``. A method ``close()``, if there is one, is called at the end.

    With ``tokens = True``, actions and observations are lists of token ids. Otherwise actions are texts, and
    observations are texts or chat messages. In a chat, a text is a message of the user.
    """

    def reset(self, row: Mapping[str, Any]) -> Said:
        """The first observation, which follows the prompt of the row; None: there is only the prompt.

        Args:
            row: the row of the data set.
        """
        ...

    def step(self, action: Any) -> TurnResult | tuple[Said, float, bool]:
        """The answer to a turn of the policy.

        Args:
            action: the text of the turn without its end token, or its token ids.
        """
        ...


def to_turn_result(value: Any) -> TurnResult:
    """Convert the result of ``step``: a `TurnResult`, or a tuple (said, reward, done).

    Raises:
        TypeError: the value is neither.
    """
    if isinstance(value, TurnResult):
        return value
    if isinstance(value, tuple) and len(value) == 3:
        said, reward, done = value
        return TurnResult(said, float(reward), bool(done))
    raise TypeError(f"step() returns TurnResult(said, reward, done), or a tuple of these three; got {value!r:.80}")


def checked_said(said: Any, *, tokens: bool, chat: bool) -> Any:
    """Check an observation; returns a text, a list of messages or a list of ids, or None if there are no words.

    Raises:
        TypeError: the type of the observation does not match the environment's ``tokens`` or the prompts.
    """
    if said is None:
        return None
    if tokens:
        ids = [*said] if isinstance(said, Sequence) and not isinstance(said, str | bytes) else None
        if ids is None or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
            raise TypeError(f"an environment of tokens says lists of token ids, got {said!r:.80}")
        return ids or None
    if isinstance(said, str):
        return said or None
    messages = [*said] if isinstance(said, Sequence) and not isinstance(said, bytes) else [None]
    if not all(isinstance(one, Mapping) and {"role", "content"} <= set(one) for one in messages):
        raise TypeError(f"an environment says a text or messages with 'role' and 'content', got {said!r:.80}")
    if not chat:
        raise TypeError("the prompts of this run are texts, so an environment says texts and no chat messages")
    return messages or None
