"""`AgentSession`: matches the requests of an episode's agent to the recorded turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.rollout.endpoint.openai_answers import first_stop
from rlmesh.rl.rollout.endpoint.openai_requests import CompletionRequest, RequestRefused, template_message
from rlmesh.rl.rollout.episodes.chat_spans import ChatSpans
from rlmesh.rl.rollout.episodes.recording import RecordedTurn, Recording
from rlmesh.rl.rollout.episodes.settings import EpisodeSettings
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask

__all__ = ["AgentSession", "TurnBegun"]

logger = logging.getLogger(__name__)

FIXED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Sampling fields that the run sets. The client's values are ignored, since the policy must train on its own
samples."""

_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class TurnBegun:
    """A request whose turn is being sampled.

    Attributes:
        parent: the recorded turn that the request continues.
        before: token ids between this turn and the new one.
        params: parameters for each choice.
        place: the turn's name in errors.
        tools: schemas of the tools in the prompt.
    """

    parent: RecordedTurn
    before: list[int]
    params: tuple[SamplingParams, ...]
    place: str
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def ids(self) -> list[int]:
        """The tokens that the engine continues."""
        return [*self.parent.ids, *self.before]


class AgentSession:
    """The requests of an agent in one episode.

    Args:
        task: the episode.
        params: the run's parameters for each turn.
        settings: limits of episodes.
        spans: converts messages to token ids.
        most_tokens: the most tokens of a branch, including the prompt.

    Attributes:
        recording: the turns.
        failure: the place of a turn whose deadline passed; ``""``: none.
        error: an error of the engine, which does not make the episode fail; None: none.
        limit: the limit that ended the episode: ``"length"`` or ``"max_turns"``; ``""``: none.
        quiet_since: time of the last answer on the loop's clock; None while a turn is sampled.
    """

    def __init__(
        self, task: EpisodeTask, params: SamplingParams, settings: EpisodeSettings, spans: ChatSpans, most_tokens: int
    ) -> None:
        self.task, self.settings = task, settings
        self._params, self._spans, self._most_tokens = params, spans, most_tokens
        self.recording = Recording()
        self.failure = self.limit = ""
        self.error: Exception | None = None
        self.quiet_since: float | None = asyncio.get_running_loop().time()
        self.answers: dict[bytes, asyncio.Future[Any]] = {}
        """The answers by request, for a client that retries."""
        self._sampling = self._begun = self._drawn = 0

    def begin(self, request: CompletionRequest) -> TurnBegun:
        """Find the turn that a request continues, and tokenise the new messages. Call `record` or `give_up` afterwards.

        Raises:
            RequestRefused: a limit of the episode is reached, or the request changes the recorded history.
        """
        turn = self._begun + 1
        if turn + request.count - 1 > self.settings.max_turns:
            self.limit = self.limit or "max_turns"
            raise RequestRefused(
                f"{self.task.name}: it had its {self.settings.max_turns} turns", code="max_turns_exceeded"
            )
        parent = self._continued(request)
        if request.count > 1 or parent.answers:
            self._require_branches(request, parent)
        before = self._tokens_after(parent, request)
        left = self._most_tokens - len(parent.ids) - len(before)
        if left < 1:
            self.limit = self.limit or "length"
            raise RequestRefused(
                f"{self.task.name} turn {turn}: {len(parent.ids) + len(before)} tokens are more than an episode may "
                f"have ({self._most_tokens})", code="context_length_exceeded",
            )  # fmt: skip
        self._tell_of_fixed(request)
        asked = replace(self._params, max_tokens=min(self._params.max_tokens, request.params.max_tokens))
        asked = replace(asked, stop=(*self._params.stop, *request.params.stop))
        # Turns that were given up count too: two turns of one prompt with one seed would be the same sample twice.
        params = tuple(self.task.params(asked, self._drawn + choice, left) for choice in range(request.count))
        parent.answers += 1
        self._begun += request.count
        self._drawn += request.count
        self._sampling += 1
        self.quiet_since = None
        tools = request.tools if parent is self.recording.root else parent.tools
        return TurnBegun(parent, before, params, f"{self.task.name} turn {turn} engine", tools)

    def record(self, begun: TurnBegun, samples: Sequence[Sample], said: Sequence[Any]) -> None:
        """Record the turns that answer a request.

        Args:
            said: the conversation after each turn, see `RecordedTurn`.
        """
        for sample, one, params in zip(samples, said, begun.params, strict=True):
            made = self.recording.add(begun.parent, begun.before, sample, one)
            made.tools = begun.tools
            made.end, made.rest = first_stop(self._spans.said(sample.token_ids), params.stop)
            if not made.end:
                made.end = made.rest = self._spans.end(sample.token_ids)
        self._end()

    def give_up(self, begun: TurnBegun) -> None:
        """Forget a request that got no answer."""
        begun.parent.answers -= 1
        self._begun -= len(begun.params)
        self._end()

    def _end(self) -> None:
        self._sampling -= 1
        if not self._sampling:
            self.quiet_since = asyncio.get_running_loop().time()

    @property
    def turn(self) -> int:
        """The number of the present turn (or of the next one, between turns), from 1 on."""
        return self._begun + (0 if self._sampling else 1)

    def _continued(self, request: CompletionRequest) -> RecordedTurn:
        """The recorded turn that a request continues. Tools are part of the prompt: a request that offers others than
        the recorded turns had continues none."""
        found = self.recording.find(request.given)
        if found is self.recording.root or request.tools == found.tools or not isinstance(request.given, list):
            return found
        if not request.tools and request.named_tools == found.tools:
            return found  # tool_choice: the policy knows the tools, and may call none now
        before = [template_message(one) for one in request.given[: len(found.said) - 1]]
        try:
            same = self._spans.prompt(before, found.tools) == self._spans.prompt(before, request.tools)
        except UsageError as error:
            raise RequestRefused(f"{self.task.name}: {error}", param="tools") from error
        return found if same else self.recording.root

    def _require_branches(self, request: CompletionRequest, parent: RecordedTurn) -> None:
        if self.settings.history == "branch":
            return
        if request.count > 1:
            raise RequestRefused(
                f"n={request.count} opens branches, and this run has none: set episode.history to 'branch', or n to 1",
                param="n",
            )
        raise RequestRefused(
            f"{self.task.name}: the request does not continue the recorded turns: it agrees with "
            f"{parent.depth} of {len(self.recording)} turns, {self._difference(request, parent)}. Send the answers "
            "back unchanged, or set episode.history to 'branch'", status=409, code="history_changed",
        )  # fmt: skip

    def _difference(self, request: CompletionRequest, parent: RecordedTurn) -> str:
        if self.recording.find(request.given) is not parent:
            return "and offers other tools than these turns, in which tools are part of the prompt"
        recorded = next((one for one in self.recording.last_turns() if type(one.said) is type(request.given)), None)
        if recorded is None or recorded.said[: len(request.given)] == request.given:
            return "and the next turn has its answer already"
        for place, (old, new) in enumerate(zip(recorded.said, request.given, strict=False)):
            if old != new:
                return f"and differs at place {place}: {old!r:.80} was recorded, {new!r:.80} came"
        return "and is shorter"

    def _tokens_after(self, parent: RecordedTurn, request: CompletionRequest) -> list[int]:
        given, said = request.given, parent.said
        try:
            if isinstance(given, tuple):
                return list(given[len(said or ()) :])
            if isinstance(given, str):
                return self._spans.text(parent.unrepeated(given[len(said) :])) if said else self._spans.prompt(given)
            messages = [template_message(one) for one in given]
            if not said:
                return self._spans.prompt(messages, request.tools)
            new = messages[len(said) :]
            if not new:
                raise RequestRefused("a request for a further turn has at least one new message", param="messages")
            # The last recorded message is the answer, whose ids are known.
            return self._spans.extension(messages[: len(said) - 1], parent.turns[-1].ids.tolist(), new, parent.tools)
        except UsageError as error:
            raise RequestRefused(f"{self.task.name}: {error}", param="messages") from error

    def _tell_of_fixed(self, request: CompletionRequest) -> None:
        """Warn, once for each field in the life of the process, that a value of the client has no effect."""
        for name in FIXED:
            wanted, own = getattr(request.params, name), getattr(self._params, name)
            if name in request.own and wanted != own and name not in _told:
                _told.add(name)
                logger.warning(
                    "the agent asks for %s=%s, but its episodes are sampled with the run's %s=%s: a policy is trained "
                    "on what it samples", name, wanted, name, own,
                )  # fmt: skip
        if "seed" in request.own and "seed" not in _told:
            _told.add("seed")
            logger.warning(
                "the agent asks for seed=%s, which has no effect: the seed of a turn follows from that of its episode",
                request.params.seed,
            )
