"""`Endpoint`: OpenAI's interface (completions, chat completions, models) on an engine of this process.

::

    async with Endpoint(engine, tokenizer, model="policy", max_tokens=256) as endpoint:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)

Each episode of an agent has a base URL of its own, ``…/episodes/NAME/v1``. Requests to it are recorded
(`rlmesh.rl.rollout.endpoint.sessions`); requests to ``…/v1`` are not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlmesh.errors import UsageError, WeightsNotReady
from rlmesh.rl.engines.rollout import RolloutEngine, Sample, SamplingParams
from rlmesh.rl.rollout.endpoint.openai_answers import AnswerWriter, ChoiceText, answer_head
from rlmesh.rl.rollout.endpoint.openai_requests import (
    CompletionRequest,
    RequestRefused,
    read_request,
    template_message,
)
from rlmesh.rl.rollout.endpoint.sessions import AgentSession, TurnBegun
from rlmesh.rl.rollout.episodes.chat_spans import ChatSpans
from rlmesh.rl.rollout.episodes.deadlines import EpisodeThread, PlaceTimeout
from rlmesh.rl.rollout.episodes.recording import RecordedTurn
from rlmesh.rl.rollout.episodes.tools import ToolCallParser, hermes_calls
from rlmesh.rl.rollout.episodes.turn_sampler import TurnSampler

__all__ = ["Endpoint"]

logger = logging.getLogger(__name__)

START_S, STOP_S = 10.0, 5.0
SWITCH_S = 0.0005
"""Python's switch interval while the endpoint runs: seconds after which a busy thread (the engine's) lets its event
loop run. Python's default of 5 ms would delay each first token by as much."""
MOST_BODY = 32 * 2**20
RETRY = "x-stainless-retry-count"
"""Header of OpenAI's clients that counts retries of a request without an answer."""

Queue = asyncio.Queue[tuple[int, Sequence[int], Sequence[float], "Sample | BaseException | None"]]


class Endpoint:
    """An HTTP server with OpenAI's interface, on the event loop that starts it.

    Args:
        engine: the engine that samples.
        tokenizer: a tokenizer of transformers.
        model: the name in the list of models.
        max_tokens: token limit of a response, if a client sets none.
        host: the address to listen on. Connections are not encrypted: give another address than loopback only in a
            trusted network.
        port: the port to listen on; 0: a free one.
        api_key: the key for requests; ``""``: a new random key of 256 bits.
        own_key: another key, which is accepted for the URLs of episodes (these are secret too): the user's own key,
            which a client finds in its environment.
        timeout_s: time limit of a request that belongs to no episode.
        parse: finds tool calls in texts.
        sampler: samples turns; None: a new `TurnSampler`.
        template: further arguments of the chat template.
    """

    def __init__(
        self, engine: RolloutEngine, tokenizer: Any, *, model: str = "policy", max_tokens: int = 256,
        host: str = "127.0.0.1", port: int = 0, api_key: str = "", own_key: str = "", timeout_s: float = 600.0,
        parse: ToolCallParser = hermes_calls, sampler: TurnSampler | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.api_key, self._own_key = model, api_key or secrets.token_urlsafe(32), own_key
        self._host, self._port, self._max_tokens, self._timeout_s = host, port, max_tokens, timeout_s
        self._spans, self._parse = ChatSpans(tokenizer, template=template or {}), parse
        self._own_sampler = sampler is None
        self._sampler = sampler or TurnSampler(engine)
        self._sessions: dict[str, AgentSession] = {}
        self._switch_s = sys.getswitchinterval()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Endpoint:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen.

        Raises:
            UsageError: the address cannot be listened on.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # asyncio sets TCP_NODELAY, which sends small pieces at once, only on sockets with this protocol number.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
        except OSError as error:
            listener.close()
            raise UsageError(f"the endpoint cannot listen on {self._host}:{self._port}: {error}") from error
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app(), log_level="warning", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1,
            loop="none", backlog=1024,
        )  # fmt: skip
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))
        self._server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        async with asyncio.timeout(START_S):
            listening = asyncio.ensure_future(self._server.listening.wait())
            await asyncio.wait([listening, self._serving], return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
        if self._serving.done():
            await self._serving

    async def stop(self) -> None:
        """Close all connections, and end."""
        if self._serving is not None and self._server is not None:
            self._server.should_exit = True
            sys.setswitchinterval(self._switch_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await asyncio.shield(self._serving)
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving
        if self._own_sampler:
            self._sampler.close()

    @property
    def base_url(self) -> str:
        """The base URL for requests that are not recorded."""
        return f"{self._root}/v1"

    @property
    def _root(self) -> str:
        host = "127.0.0.1" if self._host == "0.0.0.0" else "[::1]" if self._host == "::" else self._host
        return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{self._port}"

    def open_session(self, session: AgentSession) -> str:
        """Accept requests for a session; returns its base URL."""
        name = f"{session.task.number}-{secrets.token_hex(16)}"
        self._sessions[name] = session
        return f"{self._root}/episodes/{name}/v1"

    def close_session(self, base_url: str) -> None:
        """Refuse further requests of a session."""
        self._sessions.pop(base_url.split("/")[-2], None)

    # Requests.

    def _app(self) -> Starlette:
        routes = []
        for prefix in ("", "/episodes/{episode}"):
            routes += [
                Route(f"{prefix}/v1/models", self._guarded(self._models), methods=["GET"]),
                Route(f"{prefix}/v1/models/{{model:path}}", self._guarded(self._one_model), methods=["GET"]),
                Route(f"{prefix}/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route(f"{prefix}/v1/completions", self._guarded(self._completions), methods=["POST"]),
            ]
        refuse = self._guarded(self._unknown)
        every = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        return Starlette(routes=[*routes, Route("/{path:path}", refuse, methods=every)])

    def _guarded(
        self, handle: Callable[[Request, AgentSession | None], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: check the key, find the session, and turn errors into OpenAI's format."""

        async def answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
                name = request.path_params.get("episode")
                session = None if name is None else self._sessions.get(name)
                keys = [self.api_key, *([self._own_key] if session is not None and self._own_key else ())]
                if not any(secrets.compare_digest(given, key.encode()) for key in keys):
                    raise RequestRefused("the API key is wrong", status=401, code="invalid_api_key")
                if name is not None and session is None:
                    raise RequestRefused(f"there is no episode {name}, or it has ended", status=404)
                return await handle(request, session)
            except RequestRefused as refused:
                return JSONResponse(refused.body(), refused.status)

        return answer

    async def _unknown(self, request: Request, session: AgentSession | None) -> Response:
        raise RequestRefused(f"there is no {request.method} {request.url.path}", status=404, code="unknown_url")

    async def _models(self, request: Request, session: AgentSession | None) -> Response:
        return JSONResponse({"object": "list", "data": [self._about_model()]})

    async def _one_model(self, request: Request, session: AgentSession | None) -> Response:
        if (name := request.path_params["model"]) != self.model:
            raise RequestRefused(f"there is no model {name}; there is {self.model}", status=404, code="model_not_found")
        return JSONResponse(self._about_model())

    def _about_model(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "rlmesh"}

    async def _chat(self, request: Request, session: AgentSession | None) -> Response:
        return await self._complete(request, session, chat=True)

    async def _completions(self, request: Request, session: AgentSession | None) -> Response:
        return await self._complete(request, session, chat=False)

    async def _complete(self, http: Request, session: AgentSession | None, *, chat: bool) -> Response:
        body = await http.body()
        if len(body) > MOST_BODY:
            raise RequestRefused(f"the body has more than {MOST_BODY} bytes", status=413)
        request = read_request(body, chat=chat, max_tokens=self._max_tokens)
        if request.stream:
            begun = self._begin(request, session)
            pieces = self._pieces(request, session, begun)
            try:
                first = await anext(pieces)  # an error before the first token is sent with its own HTTP status
            except BaseException:
                await pieces.aclose()
                raise
            return StreamingResponse(_events(first, pieces), media_type="text/event-stream")
        if session is None:
            return JSONResponse(await self._whole(request, None))
        # An agent that retries a request gets the recorded answer, and no second turn is sampled.
        key = hashlib.sha256(http.url.path.encode() + body).digest()
        known = session.answers.get(key)
        if known is None or http.headers.get(RETRY, "0") == "0" or (known.done() and known.exception()):
            known = session.answers[key] = asyncio.ensure_future(self._whole(request, session))
        return JSONResponse(await asyncio.shield(known))

    async def _whole(self, request: CompletionRequest, session: AgentSession | None) -> dict[str, Any]:
        begun = self._begin(request, session)
        writer = AnswerWriter(request, self._spans, self._parse)
        async with _Recorded(session, begun) as recorded:
            samples = await self._samples(begun, session)
            choices, said = [], []
            for index, sample in enumerate(samples):
                text = ChoiceText(self._spans, begun.params[index].stop).end(sample.token_ids)
                message = await self._message(writer, text, begun, session)
                choices.append(writer.choice(index, text, message, sample))
                said.append(_said(request, text, message, sample))
            recorded.keep(samples, said)
        usage = writer.usage(len(begun.ids), samples)
        return {**answer_head(request, self.model, piece=False), "choices": choices, "usage": usage}

    async def _pieces(
        self, request: CompletionRequest, session: AgentSession | None, begun: TurnBegun
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of a streamed answer. With tools, each choice is one piece, since its text may be a tool call."""
        head = answer_head(request, self.model, piece=True)
        writer = AnswerWriter(request, self._spans, self._parse)
        count = len(begun.params)
        texts = [ChoiceText(self._spans, params.stop) for params in begun.params]
        samples: dict[int, Sample] = {}
        said: dict[int, Any] = {}
        started: set[int] = set()
        async with _Recorded(session, begun) as recorded:
            queue: Queue = asyncio.Queue()
            sampling = asyncio.ensure_future(self._samples(begun, session, queue))
            try:
                while len(samples) < count:
                    index, ids, log_probs, result = await queue.get()
                    if isinstance(result, BaseException):
                        await sampling
                    first = index not in started
                    if result is None:
                        text = texts[index].add(ids)
                        if request.tools or not (text or request.log_probs or request.token_ids or first):
                            continue
                        started.add(index)
                        piece = writer.piece(index, text, first=first, ids=ids, log_probs=log_probs)
                        yield {**head, "choices": [piece]}
                        continue
                    assert isinstance(result, Sample)
                    rest = texts[index].end(result.token_ids)
                    message = await self._message(writer, texts[index].told, begun, session)
                    if request.tools:
                        rest = message["content"]
                    said[index] = _said(request, texts[index].told, message, result)
                    samples[index] = result
                    if len(samples) == count:
                        # The turn is recorded before its last piece is sent, so that the client's next request finds
                        # it.
                        recorded.keep(
                            [samples[place] for place in range(count)], [said[place] for place in range(count)]
                        )
                    whole = result if request.tools else None
                    piece = writer.piece(
                        index, rest, first=first, finish_reason=writer.finish_reason(message, result),
                        tool_calls=message.get("tool_calls", ()), ids=whole.token_ids if whole else (),
                        log_probs=whole.log_probs if whole else (),
                    )  # fmt: skip
                    yield {**head, "choices": [piece]}
            finally:
                sampling.cancel()
        if request.usage:
            yield {**head, "choices": [], "usage": writer.usage(len(begun.ids), list(samples.values()))}

    async def _message(
        self, writer: AnswerWriter, text: str, begun: TurnBegun, session: AgentSession | None
    ) -> dict[str, Any]:
        """The assistant's message with this text. A parser of the user finds its tool calls on a thread: it may
        hang."""
        if self._parse is hermes_calls or not writer.parses:
            return writer.message(text)
        place, thread = begun.place.replace(" engine", " tool_calls"), EpisodeThread("rlmesh-tool-calls")
        try:
            message: dict[str, Any] = await thread.call(
                writer.message, text, timeout_s=self._limit(session), place=place
            )
            return message
        except PlaceTimeout as error:
            raise _as_refused(error, session) from error
        finally:
            thread.close()

    def _limit(self, session: AgentSession | None) -> float:
        """The time limit of a turn, in seconds."""
        return self._timeout_s if session is None else session.settings.turn_timeout_s

    def _begin(self, request: CompletionRequest, session: AgentSession | None) -> TurnBegun:
        if session is not None:
            return session.begin(request)
        given = request.given
        try:
            if isinstance(given, tuple):
                ids = list(given)
            elif isinstance(given, str):
                ids = self._spans.prompt(given)
            else:
                ids = self._spans.prompt([template_message(one) for one in given], request.tools)
        except UsageError as error:
            raise RequestRefused(str(error), param="messages" if request.chat else "prompt") from error
        seed = request.params.seed
        seeds = [None if seed is None else seed + place for place in range(request.count)]
        params = tuple(replace(request.params, seed=one) for one in seeds)
        return TurnBegun(RecordedTurn(None), ids, params, "the engine")

    async def _samples(
        self, begun: TurnBegun, session: AgentSession | None, queue: Queue | None = None
    ) -> list[Sample]:
        """Sample all choices. Tokens, and then the samples, are put into the queue as they come."""
        limit, loop = self._limit(session), asyncio.get_running_loop()

        async def one(index: int, params: SamplingParams) -> Sample:
            watch = None
            if queue is not None:

                def watch(ids: Sequence[int], log_probs: Sequence[float]) -> None:
                    item = (index, list(ids), list(log_probs), None)
                    loop.call_soon_threadsafe(queue.put_nowait, item)

            sample = await self._sampler.sample(begun.ids, params, timeout_s=limit, place=begun.place, on_tokens=watch)
            if queue is not None:
                queue.put_nowait((index, (), (), sample))
            return sample

        choices = [asyncio.ensure_future(one(index, params)) for index, params in enumerate(begun.params)]
        try:
            return list(await asyncio.gather(*choices))
        except Exception as error:
            if queue is not None:
                queue.put_nowait((0, (), (), error))
            raise _as_refused(error, session) from error
        finally:
            for choice in choices:
                choice.cancel()


class _Server(uvicorn.Server):
    """A uvicorn server with an event that is set when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class _Recorded:
    """A context in which a turn is sampled. At its end, the turn is given up unless it was recorded."""

    def __init__(self, session: AgentSession | None, begun: TurnBegun) -> None:
        self._session, self._begun, self._kept = session, begun, False

    def keep(self, samples: Sequence[Sample], said: Sequence[Any]) -> None:
        if self._session is not None and not self._kept:
            self._kept = True
            self._session.record(self._begun, samples, said)

    async def __aenter__(self) -> _Recorded:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None and not self._kept:
            self._kept = True
            self._session.give_up(self._begun)


def _said(request: CompletionRequest, text: str, message: dict[str, Any], sample: Sample) -> Any:
    """The conversation including this answer, in the form of the request (messages, text or token ids)."""
    if isinstance(request.given, list):
        return [*request.given, message]
    return request.given + text if isinstance(request.given, str) else (*request.given, *sample.token_ids)


def _as_refused(error: Exception, session: AgentSession | None) -> Exception:
    """Turn an error of sampling into a refusal; the session records a passed deadline or an error of the engine."""
    if isinstance(error, PlaceTimeout):
        if session is not None:
            session.failure = session.failure or str(error)
        return RequestRefused(str(error), status=504, code="timeout")
    if session is not None:
        session.error = session.error or error
    if isinstance(error, WeightsNotReady):
        return RequestRefused(str(error), status=503, code="weights_not_ready")
    if isinstance(error, UsageError):
        return RequestRefused(str(error))
    logger.warning("the engine failed", exc_info=error)
    return RequestRefused(f"the engine failed: {type(error).__name__}: {error}", status=500)


async def _events(first: dict[str, Any], pieces: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Encode pieces as server-sent events."""
    try:
        yield _event(first)
        async for piece in pieces:
            yield _event(piece)
        yield b"data: [DONE]\n\n"
    except RequestRefused as refused:
        yield _event(refused.body())
    finally:
        await pieces.aclose()


def _event(piece: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(piece, ensure_ascii=False)}\n\n".encode()
