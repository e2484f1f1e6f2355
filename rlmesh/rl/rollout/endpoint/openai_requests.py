"""Parses and checks requests in OpenAI's format; faults become errors that OpenAI's clients understand. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmesh.rl.engines.rollout import SamplingParams

__all__ = ["CompletionRequest", "RequestRefused", "read_request", "template_message"]

IGNORED = frozenset(
    {"user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
     "reasoning_effort", "verbosity"}
)  # fmt: skip
"""Fields that have no effect on answers, and are ignored."""
KNOWN = frozenset(
    {"model", "messages", "prompt", "n", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens",
     "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "presence_penalty",
     "frequency_penalty", "repetition_penalty", "tools", "tool_choice", "response_format", "return_token_ids"}
)  # fmt: skip
MOST_CHOICES = 128


class RequestRefused(Exception):
    """The request is refused: an error that is sent in OpenAI's format.

    Args:
        message: text for people.
        status: HTTP status.
        param: the field at fault.
        code: error code for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for completions or chat completions.

    Attributes:
        model: the client's name for the model.
        given: messages of a chat, a text, or token ids.
        params: parameters of sampling.
        count: number of choices.
        stream: True: the answer is streamed.
        usage: True: the last piece has the numbers of tokens.
        log_probs: True: the answer has the log-probability of each token.
        tools: schemas of the tools that the policy may call.
        named_tools: schemas of all tools in the request; ``tool_choice`` may forbid them.
        token_ids: True: the answer has token ids (an addition to OpenAI's interface, with vLLM's field names).
        own: names of the sampling fields that the client has set.
    """

    model: str
    given: list[dict[str, Any]] | str | tuple[int, ...]
    params: SamplingParams
    count: int = 1
    stream: bool = False
    usage: bool = False
    log_probs: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    named_tools: tuple[Mapping[str, Any], ...] = ()
    token_ids: bool = False
    own: frozenset[str] = field(default_factory=frozenset)

    @property
    def chat(self) -> bool:
        """The request is for a chat completion."""
        return isinstance(self.given, list)


def read_request(body: bytes, *, chat: bool, max_tokens: int) -> CompletionRequest:
    """Parse the body of a request.

    Args:
        chat: True for a chat completion.
        max_tokens: token limit of a response, if the client sets none.

    Raises:
        RequestRefused: the request is wrong; the error names the field at fault.
    """
    try:
        values = json.loads(body)
    except ValueError as error:
        raise RequestRefused(f"the body is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestRefused("the body is no JSON object")
    values = {name: value for name, value in values.items() if value is not None}
    for name in values:
        if name not in KNOWN and name not in IGNORED:
            raise RequestRefused(f"{name} is not supported by this endpoint", param=name, code="unsupported_parameter")
    options = _Fields(values)
    streams, stream_options = options.flag("stream"), values.get("stream_options", {})
    if not isinstance(stream_options, Mapping) or set(stream_options) - {"include_usage", "include_obfuscation"}:
        raise RequestRefused("stream_options has include_usage only", param="stream_options")
    tools, offered = values.get("tools", []), values.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(isinstance(one, Mapping) and "function" in one for one in tools):
        raise RequestRefused("tools is a list of functions", param="tools")
    if offered not in ("auto", "none"):
        raise RequestRefused("tool_choice is 'auto' or 'none': the policy cannot be forced", param="tool_choice")
    if values.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise RequestRefused("response_format is {'type': 'text'}", param="response_format")
    count = options.whole("n", 1)
    if not 1 <= count <= MOST_CHOICES:
        raise RequestRefused(f"n is 1 to {MOST_CHOICES}", param="n")
    return CompletionRequest(
        model=str(values.get("model", "")),
        given=_messages(values.get("messages")) if chat else _prompt(values.get("prompt")),
        params=_params(options, max_tokens, chat=chat),
        count=count,
        stream=streams,
        usage=bool(stream_options.get("include_usage")),
        log_probs=_wants_log_probs(values, chat=chat),
        tools=() if offered == "none" else tuple(tools),
        named_tools=tuple(tools),
        token_ids=options.flag("return_token_ids"),
        own=frozenset(values),
    )


class _Fields:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise RequestRefused(f"{name} is true or false, got {value!r:.60}", param=name)
        return value

    def whole(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestRefused(f"{name} is a whole number, got {value!r:.60}", param=name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestRefused(f"{name} is a number, got {value!r:.60}", param=name)
        return float(value)


def _params(options: _Fields, max_tokens: int, *, chat: bool) -> SamplingParams:
    limit = "max_completion_tokens" if "max_completion_tokens" in options.values and chat else "max_tokens"
    stop = options.values.get("stop", ())
    seed = options.whole("seed", 0) if "seed" in options.values else None
    try:
        return SamplingParams(
            options.whole(limit, max_tokens),
            temperature=options.number("temperature", 1.0),
            top_p=options.number("top_p", 1.0),
            top_k=max(options.whole("top_k", 0), 0),
            min_p=options.number("min_p", 0.0),
            seed=seed,
            presence_penalty=options.number("presence_penalty", 0.0),
            frequency_penalty=options.number("frequency_penalty", 0.0),
            repetition_penalty=options.number("repetition_penalty", 1.0),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
    except (ValueError, TypeError) as error:
        raise RequestRefused(f"the sampling parameters are wrong: {error}", code="invalid_value") from error


def _wants_log_probs(values: Mapping[str, Any], *, chat: bool) -> bool:
    wanted = values.get("logprobs", False)
    if values.get("top_logprobs", 0) or (not chat and isinstance(wanted, int) and wanted > 1):
        name = "top_logprobs" if chat else "logprobs"
        raise RequestRefused(f"{name}: the engines give the sampled token only; ask for none of the others", param=name)
    if not isinstance(wanted, bool | int):
        raise RequestRefused(f"logprobs={wanted!r:.60} is wrong", param="logprobs")
    return wanted is not False


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(one) is int for one in given):
        return tuple(given)
    raise RequestRefused("prompt is one text, or one list of token ids", param="prompt")


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise RequestRefused("messages is a list with at least one message", param="messages")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(given)]


def _message(given: Any, place: str) -> dict[str, Any]:
    """A message in the normal form for comparisons: role, text, tool calls, and the call that it answers."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise RequestRefused(f"{place} has no role", param=place)
    content = given.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise RequestRefused(f"{place} has a part that is no text: the engines take texts only", param=place)
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str | None):
        raise RequestRefused(f"{place}.content is a text, got {content!r:.60}", param=place)
    found: dict[str, Any] = {"role": given["role"], "content": content or ""}
    if calls := given.get("tool_calls"):
        try:
            found["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {
                    "name": str(call["function"]["name"]), "arguments": str(call["function"]["arguments"])}}
                for call in calls
            ]  # fmt: skip
        except (KeyError, TypeError) as error:
            raise RequestRefused(f"{place}.tool_calls is no list of function calls", param=place) from error
    for name in ("tool_call_id", "name"):
        if given.get(name):
            found[name] = str(given[name])
    return found


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form for chat templates, in which arguments of tool calls are objects instead of texts."""
    calls: Sequence[Any] = message.get("tool_calls", ())
    if not calls:
        return dict(message)
    made = []
    for call in calls:
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            arguments = call["function"]["arguments"]
        made.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": made}
