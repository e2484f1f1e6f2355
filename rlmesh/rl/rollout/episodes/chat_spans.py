"""`ChatSpans`: tokenises new messages of a chat as a span that is appended to the recorded token ids.

A chat template formats whole conversations. To format the conversation anew in each turn would tokenise the policy's
words a second time, often differently, and training would use tokens that were never sampled. So the recorded ids are
kept, and only the new text is tokenised: the conversation is formatted with a mark in place of the policy's last turn,
and the text after the mark (the end of this turn, the new messages, the beginning of the next turn) is the span.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.data.chat import Message, prompt_ids

__all__ = ["ChatSpans"]

MARK, EARLIER = "rlmesh-9f1c-mark", "rlmesh-9f1c-turn"


class ChatSpans:
    """Tokenises prompts, and the messages between two turns of the policy.

    Args:
        tokenizer: a tokenizer of transformers.
        tools: schemas for the chat template.
        template: further arguments of the chat template.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), template: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._tools = [dict(one) for one in tools]
        self._template = dict(template or {})
        self._special = frozenset(tokenizer.all_special_ids)

    @property
    def name(self) -> str:
        """The name of the tokenizer, for errors."""
        return str(getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__)

    def prompt(self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of the text or the messages that an episode begins with.

        Raises:
            UsageError: the chat template refuses the messages, or does not exist.
        """
        if isinstance(messages, str):
            return prompt_ids(self.tokenizer, messages)
        try:
            return prompt_ids(self.tokenizer, messages, **self._options(tools))
        except UsageError:
            raise
        except Exception as error:  # raised by Jinja or the template
            raise UsageError(
                f"the chat template of {self.name} refuses these messages ({error}): {_roles(messages)}"
            ) from error

    def text(self, text: str) -> list[int]:
        """Token ids of a text that follows other tokens."""
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids

    def said(self, ids: Sequence[int]) -> str:
        """The text of a turn of the policy, without its end token."""
        kept = list(ids[:-1] if ids and ids[-1] in self._special else ids)
        return self.decode(kept)

    def end(self, ids: Sequence[int]) -> str:
        """The text of the end token of a turn of the policy; ``""``: it has none."""
        return self.decode(ids[-1:]) if ids and ids[-1] in self._special else ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        found: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return found

    def extension(
        self, before: Sequence[Message], turn: Sequence[int], new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:  # fmt: skip
        """Token ids that follow a turn of the policy: its end, the new messages, and the beginning of the next turn.

        Args:
            before: the messages before the policy's turn.
            turn: the token ids of the policy's turn.
            new: the messages after it.
            tools: schemas of tools; None: those of the constructor.

        Raises:
            UsageError: the template refuses the messages, or cannot be extended by appending: the new messages change
                the text before them.
        """
        end = self.end(turn)
        after = self._after_mark(before, new, tools)
        return self.text(after.removeprefix(end) if end else after)

    def check(self, prompt: Sequence[Message], roles: Sequence[str]) -> None:
        """Check that a message of each role can follow a turn of the policy.

        Raises:
            UsageError: see `extension`.
        """
        for role in roles:
            self._after_mark(prompt, [{"role": role, "content": "a"}], None)

    def _after_mark(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        earlier = [_marked(one, EARLIER) for one in before]
        whole = self._render([*earlier, {"role": "assistant", "content": MARK}, *map(dict, new)], tools)
        asked = self._render(earlier, tools)
        head, mark, after = whole.partition(MARK)
        if not mark or MARK in after:
            raise UsageError(
                f"the chat template of {self.name} cannot be extended by appending: with {_roles(new)} after it, a "
                f"turn of the assistant appears {whole.count(MARK)} times"
            )
        if head != asked:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(head, asked, strict=False))
            place = sum(1 for _ in same)
            old, other = asked[place : place + 40], head[place : place + 40]
            raise UsageError(
                f"the chat template of {self.name} cannot be extended by appending: {_roles(new)} after a turn of the "
                f"assistant changes the text before it, from {old!r} to {other!r}. Use a template that leaves "
                "earlier messages as they are"
            )
        return after

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(f"the tokenizer {self.name} has no chat template: give prompts and observations as texts")
        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(one) for one in messages], tokenize=False, add_generation_prompt=True, **self._options(tools)
            )
        except Exception as error:  # raised by Jinja or the template
            raise UsageError(
                f"the chat template of {self.name} refuses {_roles(messages)}: {error}. It cannot be extended by "
                "appending such a message"
            ) from error
        return text

    def _options(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        given = self._tools if tools is None else [dict(one) for one in tools]
        return self._template | ({"tools": given} if given else {})


def _marked(message: Message, mark: str) -> dict[str, Any]:
    """A copy of a message. The assistant's content is replaced by a mark: a template may format it differently later
    on, but its ids are recorded."""
    return {"role": "assistant", "content": mark} if message["role"] == "assistant" else dict(message)


def _roles(messages: Sequence[Message]) -> str:
    found = [re.sub(r"[^\w-]", "?", str(one.get("role"))) for one in messages]
    return f"a message of {found[0]}" if len(found) == 1 else f"messages of {', '.join(found)}"
