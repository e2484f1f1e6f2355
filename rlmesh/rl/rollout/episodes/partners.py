"""The partner of the policy in an episode: a user's environment, or tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlmesh.rl.rollout.episodes.deadlines import EpisodeThread, PlaceTimeout
from rlmesh.rl.rollout.episodes.environments import TurnResult, checked_said, to_turn_result
from rlmesh.rl.rollout.episodes.settings import EpisodeSettings
from rlmesh.rl.rollout.episodes.tools import Tool, ToolCall, ToolCallParser, hermes_calls

__all__ = ["EnvironmentPartner", "EpisodeFailed", "Partner", "ToolPartner"]


class EpisodeFailed(Exception):
    """The episode cannot go on; the text names the place and the cause."""


class Partner(Protocol):
    """The interface of a partner, which answers the policy's turns.

    Attributes:
        tokens: True if turns and answers are token ids.
    """

    tokens: bool

    async def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode; returns the words that follow the prompt, or None."""
        ...

    async def step(self, action: Any, turn: int) -> TurnResult:
        """Answer a turn of the policy; turns count from 1."""
        ...

    async def close(self) -> None:
        """End the partner."""
        ...


class EnvironmentPartner:
    """A user's environment, on the thread of its episode.

    Args:
        make: makes the environment.
        chat: True if the prompts are chat messages.
        thread: the thread of the episode.
        settings: limits of episodes.
        episode: name of the episode.
    """

    def __init__(
        self, make: Callable[[], Any], *, chat: bool, thread: EpisodeThread, settings: EpisodeSettings, episode: str
    ) -> None:
        self._make, self._chat, self._thread, self._settings = make, chat, thread, settings
        self._episode = episode
        self._name = str(getattr(make, "__name__", type(make).__name__))
        self._made: Any = None
        self.tokens = False

    async def reset(self, row: Mapping[str, Any]) -> Any:
        where = f"{self._episode} turn 0 environment {self._name}"
        self._made = await self._call(self._make, place=where)
        self.tokens = bool(getattr(self._made, "tokens", False))
        return self._checked(await self._call(self._made.reset, row, place=where), where)

    async def step(self, action: Any, turn: int) -> TurnResult:
        where = f"{self._episode} turn {turn} environment {self._name}"
        found = await self._call(self._made.step, action, place=where)
        try:
            result = to_turn_result(found)
        except (TypeError, ValueError) as error:
            raise EpisodeFailed(f"{where}: {error}") from error
        return TurnResult(self._checked(result.said, where), result.reward, result.done)

    async def close(self) -> None:
        close = getattr(self._made, "close", None)
        if close is not None:
            await self._call(close, place=f"{self._episode} environment {self._name}.close()")

    async def _call(self, function: Callable[..., Any], *args: Any, place: str) -> Any:
        try:
            return await self._thread.call(function, *args, timeout_s=self._settings.turn_timeout_s, place=place)
        except PlaceTimeout:
            raise
        except Exception as error:
            raise EpisodeFailed(f"{place}: {type(error).__name__}: {error}") from error

    def _checked(self, said: Any, where: str) -> Any:
        try:
            return checked_said(said, tokens=self.tokens, chat=self._chat)
        except TypeError as error:
            raise EpisodeFailed(f"{where}: {error}") from error


class ToolPartner:
    """Carries out the tool calls of the policy. The episode ends with a turn that calls no tool.

    Args:
        tools: the tools that the policy may call.
        parse: finds the calls in a turn.
        chat: True if the prompts are chat messages: the result of each call then is a message of the role ``tool``.
            Otherwise the results are a text.
        thread: the thread of the episode.
        settings: limits of episodes.
        episode: name of the episode.
    """

    tokens = False

    def __init__(
        self, tools: Sequence[Tool], parse: ToolCallParser, *, chat: bool, thread: EpisodeThread,
        settings: EpisodeSettings, episode: str,
    ) -> None:  # fmt: skip
        self._tools = {tool.name: tool for tool in tools}
        self._parse, self._chat, self._thread, self._settings = parse, chat, thread, settings
        self._episode = episode

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return None

    async def step(self, action: Any, turn: int) -> TurnResult:
        where = f"{self._episode} turn {turn}"
        try:
            calls = await self._calls_in(action, where)
        except PlaceTimeout:
            raise
        except Exception as error:
            raise EpisodeFailed(f"{where}: tool_calls failed: {type(error).__name__}: {error}") from error
        if wrong := [call for call in calls if not isinstance(call, ToolCall)]:
            raise EpisodeFailed(f"{where}: tool_calls returns a list of ToolCall(name, arguments), not {wrong[0]!r}")
        if not calls:
            return TurnResult(done=True)
        answers = [(call, await self._carry_out(call, where)) for call in calls]
        if not self._chat:
            return TurnResult("".join(answer for _, answer in answers))
        return TurnResult([{"role": "tool", "name": call.name, "content": answer} for call, answer in answers])

    async def _calls_in(self, text: str, where: str) -> list[Any]:
        """The calls in a turn. A parser of the user is called on the thread of the episode: it may hang."""
        if self._parse is hermes_calls:
            return [*hermes_calls(text)]
        limit, place = self._settings.turn_timeout_s, f"{where} tool_calls"
        found: list[Any] = await self._thread.call(lambda: [*self._parse(text)], timeout_s=limit, place=place)
        return found

    async def _carry_out(self, call: ToolCall, where: str) -> str:
        """Carry out a call; returns the answer as a text."""
        place = f"{where} tool {call.name}"
        tool = self._tools.get(call.name)
        fault = call.fault or (
            tool.fault_of(call) if tool else f"there is no tool {call.name!r}; there is {', '.join(self._tools)}"
        )
        if fault or tool is None:
            return self._error(f"{place}: {fault}", fault)
        limit = min(tool.timeout_s or self._settings.turn_timeout_s, self._settings.turn_timeout_s)
        try:
            value = await self._thread.call(tool.function, timeout_s=limit, place=place, arguments=call.arguments)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except PlaceTimeout:
            raise
        except Exception as error:
            return self._error(f"{place}: {type(error).__name__}: {error}", f"{type(error).__name__}: {error}")

    def _error(self, place: str, text: str) -> str:
        if self._settings.tool_errors == "fail":
            raise EpisodeFailed(place)
        return f"error: {text}"

    async def close(self) -> None:
        pass
