"""`EpisodeSettings`: the limits of episodes, and the treatment of errors in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlmesh.rl.faults import CheckedKeywords, too_small
from rlmesh.rl.rollout.episodes.tools import ToolCallParser

__all__ = ["EpisodeSettings"]

SECONDS = ("turn_timeout_s", "episode_timeout_s")


@dataclass(frozen=True)
class EpisodeSettings(CheckedKeywords):
    """Episodes of several turns, for a run with tools, an environment or an agent.

    Attributes:
        max_turns: the most turns of the policy in an episode.
        max_tokens: the most tokens of an episode after its prompt, those of the environment included. A turn of the
            policy has at most ``rollout.max_tokens``.
        turn_timeout_s: time limit in seconds for each turn of the engine, each call of a tool or the environment, and
            the time between two requests of an agent.
        episode_timeout_s: time limit in seconds for a whole episode.
        tool_errors: an exception of a tool becomes a message to the policy (``"message"``), or the episode fails
            (``"fail"``). A tool that does not answer in time fails its episode in any case.
        tool_calls: the form in which the policy calls tools: ``"hermes"`` (JSON between ``<tool_call>`` and
            ``</tool_call>``), or a function from a text to a list of `ToolCall`, or its ``module:function``.
        history: if a request of an agent changes the recorded turns, it is refused (``"error"``), or opens a branch,
            which becomes an episode of its own (``"branch"``).
        parallel: the most episodes that an engine plays at a time.
        host: the address on which the endpoint of agents listens.
        port: port of the endpoint; 0: a free one for each engine.
    """

    max_turns: int = 8
    max_tokens: int = 4096
    turn_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0
    tool_errors: Literal["message", "fail"] = "message"
    tool_calls: str | ToolCallParser = "hermes"
    history: Literal["error", "branch"] = "error"
    parallel: int = 256
    host: str = "127.0.0.1"
    port: int = 0

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        yield from too_small(self, 1, "max_turns", "max_tokens", "parallel")
        for name in SECONDS:
            if not 0 < getattr(self, name) < float("inf"):
                yield f"{name}={getattr(self, name)} must be a number of seconds > 0"
        if not 0 <= self.port < 65536:
            yield f"port={self.port} must be 0 to 65535"
        named = self.tool_calls
        if isinstance(named, str) and named != "hermes" and ":" not in named:
            yield f"tool_calls={named!r}: write 'hermes', or module:function of a function of your own"
