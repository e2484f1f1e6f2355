"""Token ids of a row's prompt: plain text, or chat messages with the tokenizer's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmesh.errors import UsageError

__all__ = ["Message", "prompt_ids"]

Message = Mapping[str, Any]
"""``{"role": "user", "content": "…"}``, as chat templates take it."""


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Message], **template: Any) -> list[int]:
    """Token ids of a prompt.

    Text is tokenised unchanged, with the tokenizer's special tokens; messages are formatted by its chat template, with
    the prefix of the assistant's turn.

    Args:
        tokenizer: of transformers.
        prompt: a text, or a list of messages with ``role`` and ``content``.
        template: further arguments of the chat template.

    Raises:
        UsageError: messages without a template, or a prompt that is neither.
    """
    if isinstance(prompt, str):
        ids: list[int] = list(tokenizer(prompt)["input_ids"])
        return ids
    require_messages(prompt)
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"the prompts are chat messages, but the tokenizer {_name(tokenizer)} has no chat template: use an "
            "instruct model, set tokenizer.chat_template, or give the prompts as text"
        )
    found = tokenizer.apply_chat_template(
        [dict(message) for message in prompt], tokenize=True, add_generation_prompt=True, return_dict=True, **template
    )
    return list(found["input_ids"])


def require_messages(prompt: Any) -> None:
    """Check that a prompt is a list of messages.

    Raises:
        UsageError: it is not; the message says what it is.
    """
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise UsageError(f"a prompt is a text or a list of messages, got {type(prompt).__name__}: {str(prompt)[:80]!r}")
    if not prompt:
        raise UsageError("a prompt has no message")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UsageError(f"a message has 'role' and 'content', got {str(message)[:80]!r}")


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
