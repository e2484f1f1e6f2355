"""Tools: functions that the policy calls in its turns, their schemas, and the parsing of calls."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rlmesh.errors import UsageError

__all__ = ["Tool", "ToolCall", "ToolCallParser", "hermes_calls", "tools_of"]

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_BEGIN, _END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy makes.

    Attributes:
        name: name of the tool.
        arguments: arguments by name.
        fault: the reason why the call cannot be parsed, which becomes a message to the policy; ``""``: none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


ToolCallParser = Callable[[str], Sequence[ToolCall]]
"""A function from the text of a turn to the calls in it, in order."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call, with its description for the policy.

    Attributes:
        function: a plain or ``async`` function. Its result becomes a message: a text unchanged, anything else as JSON.
        name: name of the tool; ``""``: the name of the function.
        description: text for the policy; ``""``: the first paragraph of the function's docstring.
        parameters: JSON schema of the arguments; None: it is derived from the function's signature and annotations.
        timeout_s: time limit of a call; None: the time limit of the turn.
    """

    function: Callable[..., Any]
    name: str = ""
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(f"a tool is a function, got {type(self.function).__name__}: Tool(calculator)")
        name = self.name or str(getattr(self.function, "__name__", type(self.function).__name__))
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise UsageError(f"a tool's name has letters, digits, _ and -, got {name!r}: Tool(function, name=…)")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise UsageError(f"tool {name}: timeout_s={self.timeout_s} must be > 0")
        text = self.description or (inspect.getdoc(self.function) or "").partition("\n\n")[0].replace("\n", " ")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "description", text)
        if self.parameters is None:
            object.__setattr__(self, "parameters", _schema_of(self.function, name))

    @property
    def schema(self) -> dict[str, Any]:
        """The description of the tool for chat templates and OpenAI's interface."""
        about = {"name": self.name, "description": self.description, "parameters": dict(self.parameters or {})}
        return {"type": "function", "function": about}

    def fault_of(self, call: ToolCall) -> str:
        """The reason why a call does not fit the tool's parameters; ``""``: it fits."""
        parameters = self.parameters or {}
        known, needed = parameters.get("properties", {}), parameters.get("required", ())
        if missing := [name for name in needed if name not in call.arguments]:
            return f"{self.name} needs the argument {', '.join(missing)}"
        extra = [name for name in call.arguments if name not in known]
        if extra and not parameters.get("additionalProperties"):
            return f"{self.name} has no argument {', '.join(extra)}: it has {', '.join(known) or 'none'}"
        return ""


def tools_of(given: Any) -> tuple[Tool, ...]:
    """Turn functions and `Tool` objects into a tuple of tools.

    Raises:
        UsageError: something else is given, or two tools have one name.
    """
    listed = [given] if callable(given) or isinstance(given, Tool) else given
    if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Sequence):
        raise UsageError(f"tools are functions or Tool objects, got {given!r:.80}")
    made = tuple(one if isinstance(one, Tool) else Tool(one) for one in listed)
    names = [one.name for one in made]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"two tools are named {', '.join(sorted(twice))}: give Tool(…, name=…)")
    return made


def hermes_calls(text: str) -> list[ToolCall]:
    """Parse the calls in a text, in the format of Hermes and Qwen: JSON with ``name`` and ``arguments`` between
    ``<tool_call>`` and ``</tool_call>``. A call with other content has a ``fault``."""
    found, end = [], 0
    # Linear in time: a regular expression with spaces at both ends takes minutes for a long row of line breaks.
    while (start := text.find(_BEGIN, end)) >= 0 and (end := text.find(_END, start)) >= 0:
        found.append(_hermes_call(text[start + len(_BEGIN) : end].strip()))
    return found


def _hermes_call(text: str) -> ToolCall:
    try:
        read = json.loads(text)
    except ValueError as error:
        return ToolCall("", fault=f"the tool call is no JSON: {error}")
    if not isinstance(read, Mapping) or not isinstance(read.get("name"), str):
        return ToolCall("", fault="a tool call is an object with 'name' and 'arguments'")
    arguments = read.get("arguments", {})
    if not isinstance(arguments, Mapping):
        return ToolCall(read["name"], fault="'arguments' of a tool call is an object")
    return ToolCall(read["name"], dict(arguments))


def _schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The JSON schema of a function's parameters."""
    try:
        hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise UsageError(f"tool {name}: its signature cannot be read ({error}); give Tool(…, parameters=…)") from error
    known, needed, more = {}, [], False
    for one in parameters:
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            more = more or one.kind is one.VAR_KEYWORD
            continue
        if one.kind is one.POSITIONAL_ONLY:
            raise UsageError(f"tool {name}: {one.name!r} is positional only; arguments go by name")
        known[one.name] = _kind_of(hints.get(one.name))
        if one.default is one.empty:
            needed.append(one.name)
    found = {"type": "object", "properties": known, "required": needed}
    return found | ({"additionalProperties": True} if more else {})


def _kind_of(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    kind = _KINDS.get(get_origin(hint) or hint)
    found: dict[str, Any] = {} if kind is None else {"type": kind}
    if kind == "array" and get_args(hint) and (inner := _kind_of(get_args(hint)[0])):
        found["items"] = inner
    return found
