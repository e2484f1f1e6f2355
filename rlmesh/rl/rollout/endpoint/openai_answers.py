"""Answers in OpenAI's format, whole or streamed in pieces. No I/O."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlmesh.rl.engines.rollout import Sample
from rlmesh.rl.rollout.endpoint.openai_requests import CompletionRequest
from rlmesh.rl.rollout.episodes.chat_spans import ChatSpans
from rlmesh.rl.rollout.episodes.tools import ToolCallParser

__all__ = ["AnswerWriter", "ChoiceText", "answer_head", "first_stop"]


def answer_head(request: CompletionRequest, model: str, *, piece: bool) -> dict[str, Any]:
    """The fields that an answer begins with."""
    kind = ("chat.completion" if request.chat else "text_completion") + (".chunk" if piece and request.chat else "")
    prefix = "chatcmpl" if request.chat else "cmpl"
    name = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model or model}


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The first stop text in a text, and the text from it on; both are empty if there is none."""
    found = min(((place, one) for one in stop if (place := text.find(one)) >= 0), default=None)
    return ("", "") if found is None else (found[1], text[found[0] :])


class ChoiceText:
    """Streams the text of a choice, without its end token and stop text.

    All pieces together are the whole text, so the text that a client assembles equals the recorded one.

    Args:
        spans: decodes token ids.
        stop: texts that end the response, and are no part of it.
    """

    def __init__(self, spans: ChatSpans, stop: Sequence[str] = ()) -> None:
        self._spans, self._stop = spans, tuple(stop)
        self._ids: list[int] = []
        self._from, self._to = 0, 0
        self._seen = self.told = ""

    def add(self, ids: Sequence[int]) -> str:
        """The next piece of text after these tokens; it lags behind if a stop text or a character may be incomplete."""
        self._ids += ids
        # A token's text may depend on the tokens before it, so a few of these are decoded with it.
        before = self._spans.decode(self._ids[self._from : self._to])
        text = self._spans.said(self._ids[self._from :]) if self._ids else ""
        if not text.endswith("�") and len(text) >= len(before):
            self._seen += text[len(before) :]
            self._from, self._to = self._to, len(self._ids)
        return self._tell(self._seen[: len(self._seen) - self._held()])

    def end(self, ids: Sequence[int]) -> str:
        """The last piece of text.

        Args:
            ids: all tokens of the response.
        """
        text = self._spans.said(ids)
        _, rest = first_stop(text, self._stop)
        return self._tell(text[: len(text) - len(rest)])

    def _held(self) -> int:
        """The number of characters at the end that may belong to a stop text."""
        longest = 0
        for one in self._stop:
            place = self._seen.find(one)
            if place >= 0:
                longest = max(longest, len(self._seen) - place)
            for size in range(min(len(one) - 1, len(self._seen)), longest, -1):
                if self._seen.endswith(one[:size]):
                    longest = size
                    break
        return longest

    def _tell(self, text: str) -> str:
        piece = text[len(self.told) :] if text.startswith(self.told) else ""
        self.told += piece
        return piece


class AnswerWriter:
    """Writes choices of an answer, with the tool calls in them.

    Args:
        request: the client's request.
        spans: decodes token ids.
        parse: finds tool calls, if the request offers tools.
    """

    def __init__(self, request: CompletionRequest, spans: ChatSpans, parse: ToolCallParser) -> None:
        self._request, self._spans, self._parse = request, spans, parse

    @property
    def parses(self) -> bool:
        """True if `message` looks for tool calls."""
        return bool(self._request.tools)

    def message(self, text: str) -> dict[str, Any]:
        """The assistant's message with this text, in the normal form for comparisons (see `read_request`)."""
        found: dict[str, Any] = {"role": "assistant", "content": text}
        calls = [call for call in self._parse(text) if not call.fault] if self.parses else []
        if calls:
            found["content"] = text.partition("<tool_call>")[0].strip() if "<tool_call>" in text else ""
            found["tool_calls"] = [
                {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {
                    "name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}}
                for call in calls
            ]  # fmt: skip
        return found

    def choice(self, index: int, text: str, message: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        found: dict[str, Any] = {"index": index, "finish_reason": self.finish_reason(message, sample)}
        found["logprobs"] = self.log_probs(sample.token_ids, sample.log_probs) if self._request.log_probs else None
        if self._request.chat:
            content = message["content"] or (None if "tool_calls" in message else "")
            found["message"] = {**message, "content": content, "refusal": None}
        else:
            found["text"] = text
        if self._request.token_ids:
            found |= {"token_ids": sample.token_ids, "prompt_token_ids": sample.prompt_token_ids}
        return found

    def piece(
        self, index: int, text: str, *, first: bool = False, ids: Sequence[int] = (), log_probs: Sequence[float] = (),
        finish_reason: str | None = None, tool_calls: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """A choice in a piece of a streamed answer."""
        found: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        if self._request.log_probs and ids:
            found["logprobs"] = self.log_probs(ids, log_probs)
        if self._request.chat:
            found["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
            if tool_calls:
                found["delta"]["tool_calls"] = [{"index": place, **call} for place, call in enumerate(tool_calls)]
        else:
            found["text"] = text
        if self._request.token_ids and ids:
            found["token_ids"] = list(ids)
        return found

    def finish_reason(self, message: Mapping[str, Any], sample: Sample) -> str:
        """The reason for the end in OpenAI's words; a time limit counts as ``length``, and ``abort`` is kept."""
        reason = "length" if sample.finish_reason == "time" else sample.finish_reason
        return "tool_calls" if "tool_calls" in message else reason

    def log_probs(self, ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        """The log-probabilities of tokens under the sampling distribution, in nats."""
        texts = [self._spans.decode([one]) for one in ids]
        if not self._request.chat:
            return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": None, "text_offset": []}
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, log_probs, strict=True)
            ],
            "refusal": None,
        }

    @staticmethod
    def usage(prompt: int, samples: Sequence[Sample]) -> dict[str, int]:
        """The numbers of tokens in OpenAI's format; the prompt counts once for all choices."""
        made = sum(len(sample.token_ids) for sample in samples)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
