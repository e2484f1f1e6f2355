"""`EpisodePlan`: the settings of a run's episodes, and their checks before any process starts."""

from __future__ import annotations

import inspect
import ipaddress
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.data.chat import Message
from rlmesh.rl.faults import did_you_mean, unknown_parameters
from rlmesh.rl.rollout.episodes.chat_spans import ChatSpans
from rlmesh.rl.rollout.episodes.settings import EpisodeSettings
from rlmesh.rl.rollout.episodes.tools import Tool, ToolCallParser, hermes_calls, tools_of

__all__ = ["AGENT_INPUTS", "KEY", "EpisodePlan", "callable_name", "is_local", "own_key"]

KEY = "OPENAI_API_KEY"
"""The environment variable from which OpenAI's clients take their key."""
AGENT_INPUTS = {
    "base_url": "the base URL of the episode, for a client of OpenAI's interface",
    "api_key": "the key of the endpoint; the variable OPENAI_API_KEY has it too, unless it has a key of the user",
    "model": "the name of the model",
    "row": "the row of the data set",
    "seed": "a number of the episode",
}


@dataclass(frozen=True)
class EpisodePlan:
    """The part of a run's settings that its episodes need.

    Attributes:
        settings: limits and the treatment of errors.
        environment: makes an environment for each episode; None: there is none.
        tools: the tools that the policy may call.
        agent: a function that plays an episode by requests to the endpoint; None: there is none.
        max_prompt_tokens, turn_tokens: the most tokens of a prompt, and of a turn of the policy.
        prompt_key: the column of the prompts.
        template: further arguments of the chat template.
    """

    settings: EpisodeSettings
    environment: Callable[[], Any] | None = None
    tools: tuple[Tool, ...] = ()
    agent: Callable[..., Any] | None = None
    max_prompt_tokens: int = 1024
    turn_tokens: int = 256
    prompt_key: str = "prompt"
    template: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Any) -> EpisodePlan | None:
        """The plan of a run; None: its episodes have one turn."""
        if run.environment is None and not run.tools and run.agent is None:
            return None
        return cls(
            run.episode, run.environment, tools_of(run.tools) if run.tools else (), run.agent,
            run.max_prompt_tokens, run.rollout.max_tokens, run.prompt_key, run.template,
        )  # fmt: skip

    @property
    def most_tokens(self) -> int:
        """The most tokens of an episode, its prompt included."""
        return self.max_prompt_tokens + self.settings.max_tokens

    def chat_of(self, row: Mapping[str, Any]) -> list[Message] | None:
        """The chat messages of a row's prompt; None: it is a text."""
        prompt = row.get(self.prompt_key)
        return None if isinstance(prompt, str) or prompt is None else [dict(one) for one in prompt]

    def spans(self, tokenizer: Any) -> ChatSpans:
        """Make the `ChatSpans` of the run's episodes."""
        return ChatSpans(tokenizer, [tool.schema for tool in self.tools], self.template)

    def parser(self) -> ToolCallParser:
        """The function that finds tool calls in a text.

        Raises:
            UsageError: ``tool_calls`` names no function.
        """
        name = self.settings.tool_calls
        if not isinstance(name, str):
            return name
        if name == "hermes":
            return hermes_calls
        module, _, function = name.partition(":")
        try:
            found: Any = getattr(import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"episode.tool_calls={name!r}: {error}") from error
        if not callable(found):
            raise UsageError(f"episode.tool_calls={name!r} is no function")
        parse: ToolCallParser = found
        return parse

    @staticmethod
    def faults(run: Any) -> Iterator[str]:
        """One sentence per fault of environment, tools and agent whose check needs no tokenizer."""
        given = [name for name in ("environment", "tools", "agent") if getattr(run, name) not in (None, (), [])]
        if len(given) > 1:
            yield f"{' and '.join(given)}: an episode has one of them; an agent offers its tools in its requests"
        if run.environment is not None:
            yield from _environment_faults(run.environment)
        if run.tools:
            try:
                tools_of(run.tools)
            except UsageError as error:
                yield f"tools: {error}"
        if run.agent is not None:
            yield from _agent_faults(run.agent)
            if own_key() and not is_local(getattr(run.episode, "host", "")) and not _takes(run.agent, "api_key"):
                yield (
                    f"agent={callable_name(run.agent)}: its client would send {KEY}, which is set, over the network to "
                    f"episode.host={run.episode.host}: let the agent take api_key, and give it to its client"
                )

    def slow_faults(self, tokenizer: Any, row: Mapping[str, Any]) -> Iterator[str]:
        """One sentence per fault whose check needs the tokenizer or a row: the chat template cannot be extended, or the
        environment fails at its start."""
        try:
            self.parser()
        except UsageError as error:
            yield str(error)
        chat = self.chat_of(row)
        if chat and self.agent is None:
            try:
                self.spans(tokenizer).check(chat, ["tool" if self.tools else "user"])
            except UsageError as error:
                yield str(error)
        if self.environment is not None:
            yield from self._start_faults(row)

    def length_faults(self, prompt: int, positions: int | None) -> Iterator[str]:
        """A fault if an episode can be longer than the model's longest text.

        Args:
            prompt: tokens of the longest prompt; 0 if the agent writes the prompts.
            positions: the model's longest text, in tokens; None: unknown.
        """
        longest = prompt + self.settings.max_tokens
        if positions is not None and longest > positions:
            yield (
                f"episode.max_tokens={self.settings.max_tokens} after a prompt of {prompt} tokens are more than the "
                f"{positions} positions of the model: lower it"
            )

    def extras_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The extras of an example episode with one empty turn, on which rewards are tried."""
        asked = self.chat_of(row) or [{"role": "user", "content": str(row.get(self.prompt_key, ""))}]
        found: dict[str, Any] = {"turns": 1, "messages": [*asked, {"role": "assistant", "content": ""}]}
        if self.environment is not None:
            found["return"] = 0.0
        return found | ({} if self.agent is None else {"result": None})

    def _start_faults(self, row: Mapping[str, Any]) -> Iterator[str]:
        import asyncio

        from rlmesh.rl.rollout.episodes.deadlines import EpisodeThread, PlaceTimeout
        from rlmesh.rl.rollout.episodes.partners import EnvironmentPartner, EpisodeFailed

        assert self.environment is not None
        thread = EpisodeThread("rlmesh-environment-check")
        partner = EnvironmentPartner(
            self.environment, chat=bool(self.chat_of(row)), thread=thread, settings=self.settings, episode="row 0"
        )

        async def start() -> None:
            await partner.reset(row)
            await partner.close()

        try:
            asyncio.run(start())
        except (EpisodeFailed, PlaceTimeout) as error:
            yield f"environment: {error}"
        finally:
            thread.close()
            thread.join(1.0)


def callable_name(function: Any) -> str:
    """The name of a function or class, for errors."""
    return str(getattr(function, "__name__", type(function).__name__))


def _environment_faults(environment: Any) -> Iterator[str]:
    if not callable(environment):
        methods = hasattr(environment, "reset") and hasattr(environment, "step")
        hint = ": give its class, so that each episode has an environment of its own" if methods else ""
        yield f"environment={environment!r:.80} is no class or function that makes an environment{hint}"
        return
    if isinstance(environment, type):
        if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
            yield f"environment={environment.__name__} has no method {' and '.join(missing)}"
        try:
            needed = [
                one.name for one in inspect.signature(environment).parameters.values()
                if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            ]  # fmt: skip
        except (TypeError, ValueError):
            return
        if needed:
            yield (
                f"environment={environment.__name__} is made without arguments, and needs {', '.join(needed)}: give a "
                "function that makes it, such as functools.partial"
            )


def own_key() -> str:
    """The user's key in the environment; empty without one."""
    return os.environ.get(KEY, "")


def is_local(host: str) -> bool:
    """True if an address is on this machine only (loopback)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _takes(agent: Any, name: str) -> bool:
    return not callable(agent) or name in inspect.signature(agent).parameters


def _agent_faults(agent: Any) -> Iterator[str]:
    if not callable(agent):
        yield f"agent={agent!r:.80} is no function"
        return
    name = callable_name(agent)
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            yield f"agent={name} needs {package}: pip install 'rlmesh[agents]'"
    parameters = inspect.signature(agent).parameters.values()
    if any(one.kind is one.POSITIONAL_ONLY for one in parameters):
        yield f"agent={name}: arguments go by name, and it has positional ones"
    unknown = unknown_parameters(agent, AGENT_INPUTS)
    for one in unknown:
        meant = did_you_mean(one, AGENT_INPUTS)
        yield f"agent={name} has a parameter {one!r} without a default; it may have {', '.join(AGENT_INPUTS)}{meant}"
    if not unknown and not any(one.name == "base_url" for one in parameters):
        yield f"agent={name} has no parameter base_url: it could not ask the policy for anything"
