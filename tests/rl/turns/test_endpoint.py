"""`Endpoint` with OpenAI's own client: completions, chat, streams, tools, errors, and the recorded turns."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from rlmesh.errors import UsageError, WeightsNotReady  # noqa: E402
from rlmesh.rl.engines.rollout import Sample, SamplingParams  # noqa: E402
from rlmesh.rl.rollout.endpoint import sessions  # noqa: E402
from rlmesh.rl.rollout.endpoint.openai_requests import read_request  # noqa: E402
from rlmesh.rl.rollout.endpoint.server import Endpoint  # noqa: E402
from rlmesh.rl.rollout.endpoint.sessions import AgentSession  # noqa: E402
from rlmesh.rl.rollout.episodes.chat_spans import ChatSpans  # noqa: E402
from rlmesh.rl.rollout.episodes.settings import EpisodeSettings  # noqa: E402
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask  # noqa: E402
from rlmesh.rl.rollout.episodes.tools import ToolCall  # noqa: E402
from rlmesh.rl.types import Episode  # noqa: E402
from tests.own_time import HANG_S  # noqa: E402
from tests.rl.turns.scripted import ScriptedEngine, make_tokenizer  # noqa: E402

TOKENIZER = make_tokenizer()
USER = {"role": "user", "content": "2+2?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Served:
    """An endpoint with an engine, and clients of it."""

    def __init__(self, say: Callable[[str, SamplingParams], str], **options: Any) -> None:
        self.engine = ScriptedEngine(TOKENIZER, say)
        self.endpoint = Endpoint(self.engine, TOKENIZER, max_tokens=100, **options)  # type: ignore[arg-type]
        self.clients: list[Any] = []

    def client(self, base_url: str = "", **options: Any) -> Any:
        given = {"base_url": base_url or self.endpoint.base_url, "api_key": self.endpoint.api_key, "max_retries": 0}
        # A client that checks no certificates is made faster.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        self.clients.append(openai.AsyncOpenAI(**(given | {"http_client": http} | options)))
        return self.clients[-1]

    def session(self, most_tokens: int = 1000, **settings: Any) -> tuple[AgentSession, Any]:
        task = EpisodeTask(3, np.asarray([5], np.int32), {}, seed=11)
        session = AgentSession(
            task, SamplingParams(100), EpisodeSettings(**settings), ChatSpans(TOKENIZER), most_tokens
        )
        return session, self.client(self.endpoint.open_session(session))


@asynccontextmanager
async def serving(say: Callable[[str, SamplingParams], str], **options: Any) -> AsyncIterator[Served]:
    served = Served(say, **options)
    async with served.endpoint:
        try:
            yield served
        finally:
            for client in served.clients:
                await client.close()


def echo(text: str, params: SamplingParams) -> str:
    return f"[{text.count('<|im_start|>assistant')}]"


def text_of(episode: Episode, source: str) -> list[str]:
    return [TOKENIZER.decode(turn.ids.tolist()) for turn in episode.turns if turn.source == source]


def episodes_of(session: AgentSession) -> list[Episode]:
    return session.recording.episodes(session.task.prompt, {})


async def test_a_chat_completion_has_text_log_probs_ids_and_usage() -> None:
    async with serving(echo) as served:
        made = await served.client().chat.completions.create(
            model="any", messages=[USER], logprobs=True, n=2, extra_body={"return_token_ids": True}
        )
        prompt = ChatSpans(TOKENIZER).prompt([USER])
        assert [choice.message.content for choice in made.choices] == ["[1]", "[1]"]
        assert [choice.finish_reason for choice in made.choices] == ["stop", "stop"]
        ids = [*TOKENIZER("[1]")["input_ids"], TOKENIZER.eos_token_id]
        assert (made.choices[1].token_ids, made.choices[1].prompt_token_ids) == (ids, prompt)
        told = made.choices[0].logprobs.content
        assert [one.token for one in told] == ["[", "1", "]", "<|im_end|>"]
        assert [one.logprob for one in told] == pytest.approx([-0.25 - place / 64 for place in range(4)])
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), 8)
        assert [one.id for one in (await served.client().models.list()).data] == ["policy"]
        assert (await served.client().models.retrieve("policy")).owned_by == "rlmesh"


async def test_a_completion_takes_text_or_ids() -> None:
    async with serving(lambda text, params: f"{text}!{params.max_tokens}") as served:
        client = served.client()
        made = await client.completions.create(model="any", prompt="ab", max_tokens=9, logprobs=1, temperature=0.5)
        assert (made.choices[0].text, made.choices[0].finish_reason) == ("ab!9", "stop")
        assert len(made.choices[0].logprobs.token_logprobs) == 5
        made = await client.completions.create(model="any", prompt=TOKENIZER("ab")["input_ids"], max_tokens=2)
        assert (made.choices[0].text, made.choices[0].finish_reason) == ("ab", "length")


async def test_parameters_reach_the_engine() -> None:
    seen: list[SamplingParams] = []

    def say(text: str, params: SamplingParams) -> str:
        seen.append(params)
        return "a stop b"

    async with serving(say) as served:
        made = await served.client().chat.completions.create(
            model="any", messages=[USER], max_completion_tokens=77, temperature=0.5, top_p=0.9, seed=4, n=2,
            stop=["stop"], presence_penalty=0.5, extra_body={"top_k": 3, "min_p": 0.1},
        )  # fmt: skip
        assert [choice.message.content for choice in made.choices] == ["a ", "a "]
    assert seen[1] == SamplingParams(
        77, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=5, stop=("stop",), presence_penalty=0.5
    )


@pytest.mark.parametrize("stop", [None, ["END"], ["ENDING"]])
async def test_a_stream_gives_the_text_in_pieces(stop: Any) -> None:
    async with serving(lambda *_: "one two END three") as served:
        stream = await served.client().chat.completions.create(
            model="any", messages=[USER], stream=True, stop=stop, stream_options={"include_usage": True}
        )
        pieces = [piece async for piece in stream]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == ("one two " if stop == ["END"] else "one two END three")
    assert len(pieces) > len("one two ")
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices].count("stop") == 1
    assert pieces[-1].usage.completion_tokens == (11 if stop == ["END"] else 18)


async def test_a_text_is_streamed_too() -> None:
    async with serving(lambda *_: "abc") as served:
        stream = await served.client().completions.create(model="any", prompt="a", stream=True, n=2)
        texts = ["", ""]
        async for piece in stream:
            texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == ["abc", "abc"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_found_and_recorded(stream: bool) -> None:
    def say(text: str, params: SamplingParams) -> str:
        assert '"add"' in text
        return "It is 4." if "tool\n4" in text else 'So: <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'

    async with serving(say) as served:
        session, client = served.session()
        if stream:
            made = await client.chat.completions.create(model="any", messages=[USER], tools=[TOOL], stream=True)
            (piece,) = [piece async for piece in made]
            message, reason = piece.choices[0].delta, piece.choices[0].finish_reason
        else:
            made = await client.chat.completions.create(model="any", messages=[USER], tools=[TOOL])
            message, reason = made.choices[0].message, made.choices[0].finish_reason
        assert (message.content, reason) == ("So:", "tool_calls")
        (call,) = message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2}
        back = message.model_dump(exclude_none=True)
        for one in back["tool_calls"]:
            one.pop("index", None)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        made = await client.chat.completions.create(model="any", messages=[USER, back, answer], tools=[TOOL])
        assert made.choices[0].message.content == "It is 4."
        (episode,) = episodes_of(session)
        assert text_of(episode, "environment")[1] == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
        assert text_of(episode, "policy")[0].startswith("So: <tool_call>") and len(episode.turns) == 4


async def test_the_turns_of_an_episode_keep_their_ids() -> None:
    async with serving(echo) as served:
        session, client = served.session()
        messages: list[Any] = [USER]
        for turn in range(3):
            made = await client.chat.completions.create(model="any", messages=messages, temperature=0.0)
            # The client's own form of the answer: unknown fields, and content in parts.
            content = made.choices[0].message.content
            back = {"role": "assistant", "content": [{"type": "text", "text": content}], "refusal": None}
            messages += [back, {"role": "user", "content": str(turn)}]
        (episode,) = episodes_of(session)
        assert text_of(episode, "policy") == ["[1]<|im_end|>", "[2]<|im_end|>", "[3]<|im_end|>"]
        assert served.engine.asked[-1] == np.concatenate([turn.ids for turn in episode.turns[:-1]]).tolist()
        assert episode.extras["messages"][-1] == {"role": "assistant", "content": "[3]"}
        assert [turn.version_spans for turn in episode.turns if turn.source == "policy"] == [((7, 0, 4),)] * 3


async def test_a_text_that_goes_on_keeps_its_ids() -> None:
    async with serving(lambda text, _: str(len(text))) as served:
        session, client = served.session()
        text = "ab"
        for more in ("cd", ""):
            made = await client.completions.create(model="any", prompt=text)
            text += made.choices[0].text + more
        made = await client.completions.create(model="any", prompt=text)
        (episode,) = episodes_of(session)
        assert [TOKENIZER.decode(turn.ids.tolist()) for turn in episode.turns] == [
            "ab", "2<|im_end|>", "cd", "15<|im_end|>", "27<|im_end|>",
        ]  # fmt: skip


async def test_other_tools_are_another_history() -> None:
    """They are part of the prompt: without it, the policy would not see the tools that the client offers."""
    other: dict[str, Any] = {"type": "function", "function": {**TOOL["function"], "name": "multiply"}}  # type: ignore[dict-item]
    async with serving(echo) as served:
        session, client = served.session()
        for later in ({}, {"tools": [TOOL, other]}):
            with pytest.raises(openai.ConflictError, match="offers other tools than these turns"):
                for number, options in enumerate([{"tools": [TOOL]}, later]):
                    more = [{"role": "assistant", "content": "[1]"}, USER] if number else []
                    await client.chat.completions.create(model="any", messages=[USER, *more], **options)
            session, client = served.session()
        # A request that only forbids the tools of the prompt goes on.
        await client.chat.completions.create(model="any", messages=[USER], tools=[TOOL])
        known = [USER, {"role": "assistant", "content": "[1]"}, USER]
        await client.chat.completions.create(model="any", messages=known, tools=[TOOL], tool_choice="none")
        (episode,) = episodes_of(session)
        assert episode.extras["turns"] == 2 and "add" in text_of(episode, "environment")[0]
        session, client = served.session(history="branch")
        await client.chat.completions.create(model="any", messages=[USER])
        await client.chat.completions.create(model="any", messages=known, tools=[other])
        first, branch = episodes_of(session)
        assert "multiply" in text_of(branch, "environment")[0] and text_of(branch, "policy") == ["[2]<|im_end|>"]
        assert text_of(first, "policy") == ["[1]<|im_end|>"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "told", "more", "recorded"),
    [
        # An agent of thoughts and observations writes the stop text itself, and goes on after it.
        ("act Obs: 3", ["Obs:"], "act ", "Obs: 4", ["act Obs:", " 4"]),
        ("act Obs: 3", ["Obs:"], "act ", "Only 4", ["act Obs:", "Only 4"]),
        # The token that completes the stop text has more characters.
        ("act Obs: 3", ["Obs"], "act ", "Obs: 4", ["act Obs", ": 4"]),
        # An agent that formats the chat itself writes the end of the turn.
        ("act", [], "act", "<|im_end|>\nmore", ["act<|im_end|>", "\nmore"]),
        ("act", [], "act", "<|im_start|>more", ["act<|im_end|>", "<|im_start|>more"]),
    ],
)
async def test_the_end_of_a_turn_that_a_client_repeats_is_there_once(
    said: str, stop: list[str], told: str, more: str, recorded: list[str], stream: bool
) -> None:
    async with serving(lambda text, _: said) as served:
        session, client = served.session()
        given: Any = {"model": "any", "stop": stop or None, "stream": stream}

        async def asked(prompt: str) -> str:
            made = await client.completions.create(prompt=prompt, **given)
            if not stream:
                return str(made.choices[0].text)
            return "".join([piece.choices[0].text async for piece in made])

        assert await asked("go ") == told
        await asked(f"go {told}{more}")
        (episode,) = episodes_of(session)
    texts = [TOKENIZER.decode(turn.ids.tolist()) for turn in episode.turns]
    assert texts == ["go ", *recorded, recorded[0]]
    assert served.engine.text(served.engine.asked[1]) == "go " + "".join(recorded)


async def test_a_changed_history_is_an_error_that_names_the_place() -> None:
    async with serving(echo) as served:
        session, client = served.session()
        await client.chat.completions.create(model="any", messages=[USER])
        changed = [USER, {"role": "assistant", "content": "[one]"}, USER]
        with pytest.raises(openai.ConflictError) as raised:
            await client.chat.completions.create(model="any", messages=changed)
        assert raised.value.code == "history_changed"
        for part in ("episode 3", "agrees with 0 of 1 turns", "differs at place 1", "'[1]'", "'[one]'"):
            assert part in str(raised.value)
        with pytest.raises(openai.ConflictError, match="the next turn has its answer already"):
            await client.chat.completions.create(model="any", messages=[USER])
        with pytest.raises(openai.BadRequestError, match="n=2 opens branches"):
            await client.chat.completions.create(model="any", messages=[USER], n=2)
        assert len(session.recording) == 1 and len(served.engine.asked) == 1


async def test_a_changed_history_opens_a_branch_and_shared_turns_are_trained_once() -> None:
    async with serving(echo) as served:
        session, client = served.session(history="branch")
        first = await client.chat.completions.create(model="any", messages=[USER])
        known = [USER, {"role": "assistant", "content": first.choices[0].message.content}]
        for word in ("left", "right"):
            await client.chat.completions.create(model="any", messages=[*known, {"role": "user", "content": word}])
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "anew"}], n=2)
        episodes = episodes_of(session)
    assert [text_of(one, "policy") for one in episodes] == [
        ["[1]<|im_end|>", "[2]<|im_end|>"], ["[2]<|im_end|>"], ["[1]<|im_end|>"], ["[1]<|im_end|>"],
    ]  # fmt: skip
    assert "left" in text_of(episodes[0], "environment")[-1] and "right" in text_of(episodes[1], "environment")[-1]
    assert (
        episodes[1].ids[: len(episodes[0].turns[0]) + 4].tolist()
        == episodes[0].ids[: len(episodes[0].turns[0]) + 4].tolist()
    )
    assert [one.extras.get("branch") for one in episodes] == [None, 1, 2, 3]


async def test_the_limits_of_an_episode_are_errors() -> None:
    async with serving(echo) as served:
        session, client = served.session(max_turns=1)
        made = await client.chat.completions.create(model="any", messages=[USER])
        more = [USER, {"role": "assistant", "content": made.choices[0].message.content}, USER]
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="any", messages=more)
        assert (raised.value.code, session.limit) == ("max_turns_exceeded", "max_turns")
        session, client = served.session(most_tokens=20)
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="any", messages=[USER])
        assert (raised.value.code, session.limit) == ("context_length_exceeded", "length")


async def test_a_client_that_asks_again_gets_the_recorded_answer() -> None:
    async with serving(echo) as served:
        session, client = served.session()
        first = await client.chat.completions.create(model="any", messages=[USER])
        again = await client.chat.completions.create(
            model="any", messages=[USER], extra_headers={"x-stainless-retry-count": "1"}
        )
        assert again == first and len(session.recording) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_takes_too_long_is_named(stream: bool) -> None:
    async with serving(lambda *_: "<never>") as served:
        session, client = served.session(turn_timeout_s=0.2)
        with pytest.raises(openai.InternalServerError, match=r"episode 3 turn 1 engine: no answer in 0\.2 s") as raised:
            await client.chat.completions.create(model="any", messages=[USER], stream=stream)
        assert raised.value.status_code == 504
        assert session.failure == "episode 3 turn 1 engine: no answer in 0.2 s"
        assert served.engine.cancelled == 1 and not session.recording.root.answers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parser_of_tool_calls_that_hangs_is_named_and_holds_up_no_other(stream: bool) -> None:
    stuck = threading.Event()

    def parse(text: str) -> list[ToolCall]:
        if "2" in text:
            stuck.wait(HANG_S)
        return []

    async with serving(echo, parse=parse) as served:
        session, client = served.session(turn_timeout_s=0.5)
        other, its_client = served.session()
        try:
            more = [USER, {"role": "assistant", "content": "a"}, USER]
            hangs = client.chat.completions.create(model="any", messages=more, tools=[TOOL], stream=stream)
            goes = its_client.chat.completions.create(model="any", messages=[USER], tools=[TOOL])
            answers: Any = await asyncio.gather(hangs, goes, return_exceptions=True)
        finally:
            stuck.set()
        failed, made = answers
        assert isinstance(failed, openai.InternalServerError) and failed.status_code == 504
        assert session.failure == "episode 3 turn 1 tool_calls: no answer in 0.5 s"
        assert made.choices[0].message.content == "[1]" and not other.failure


async def test_a_turn_after_one_that_was_given_up_has_a_seed_of_its_own() -> None:
    """With branches, two turns of one prompt and one seed would be one sample, which is trained on twice."""
    async with serving(echo) as served:
        session, _ = served.session(history="branch")
        request = read_request(json.dumps({"messages": [USER], "n": 2}).encode(), chat=True, max_tokens=100)
        first, second = session.begin(request), session.begin(request)
        session.give_up(first)
        third = session.begin(request)
        seeds = [one.seed for begun in (first, second, third) for one in begun.params]
        assert len(set(seeds)) == 6 and session.turn == 4


async def test_sampling_fields_of_a_client_that_have_no_effect_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_told", set())
    async with serving(echo) as served:
        session, _ = served.session(history="branch")
        plain = read_request(json.dumps({"messages": [USER]}).encode(), chat=True, max_tokens=100)
        given = {"messages": [USER], "seed": 7, "temperature": 0.25}
        asking = read_request(json.dumps(given).encode(), chat=True, max_tokens=100)
        (first,) = session.begin(plain).params
        assert not caplog.messages
        (second,), (_third,) = session.begin(asking).params, session.begin(asking).params
        told = [one for one in caplog.messages if "the agent asks for" in one]
        assert [one.split()[4].split("=")[0] for one in told] == ["temperature", "seed"]
        assert "seed=7, which has no effect" in told[1]
        # The agent's seed changes nothing: the turns of an episode follow from its own.
        assert second.temperature == 1.0 and second.seed not in (7, first.seed)


async def test_a_client_that_goes_away_leaves_no_turn() -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def say(text: str, params: SamplingParams) -> str:
        loop.call_soon_threadsafe(asked.set)
        return "<never>"

    async with serving(say) as served:
        session, client = served.session()
        call = asyncio.ensure_future(client.chat.completions.create(model="any", messages=[USER], stream=True))
        await asked.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        served.endpoint.close_session(str(client.base_url).rstrip("/"))
        with pytest.raises(openai.NotFoundError, match="it has ended"):
            await client.chat.completions.create(model="any", messages=[USER])
        assert not len(session.recording)


async def test_engine_errors_are_server_errors_and_noted() -> None:
    def say(text: str, params: SamplingParams) -> str:
        raise WeightsNotReady("no weights yet")

    async with serving(say) as served:
        session, client = served.session()
        with pytest.raises(openai.InternalServerError, match="no weights yet") as raised:
            await client.chat.completions.create(model="any", messages=[USER])
        assert raised.value.status_code == 503 and isinstance(session.error, WeightsNotReady)


class Late(ScriptedEngine):
    """Ends each response at a limit of time."""

    def submit(self, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        sample = super().submit(prompt, params, **options).result()
        late: Future[Sample] = Future()
        late.set_result(replace(sample, finish_reason="time"))
        return late


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_of_time_is_a_length_for_the_client_and_recorded_as_it_is(stream: bool) -> None:
    async with serving(echo) as served:
        served.endpoint._sampler.engine = Late(TOKENIZER, echo)  # type: ignore[assignment]
        session, client = served.session()
        made = await client.chat.completions.create(model="any", messages=[USER], stream=stream)
        if stream:
            reasons = [piece.choices[0].finish_reason async for piece in made if piece.choices]
        else:
            reasons = [made.choices[0].finish_reason]
        assert [one for one in reasons if one] == ["length"]
        (episode,) = episodes_of(session)
        assert (episode.finish_reason, episode.extras["cut_off"]) == ("time", {"1": "time"})


async def test_a_wrong_key_an_unknown_episode_and_an_unknown_path_are_refused() -> None:
    async with serving(echo) as served, serving(echo) as other:
        assert served.endpoint.api_key != other.endpoint.api_key and len(served.endpoint.api_key) >= 43
        for key in ("wrong", other.endpoint.api_key, "é"):
            headers = {"Authorization": f"Bearer {key}"} if key.isascii() else {}
            with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
                await served.client(api_key=key if key.isascii() else "x", default_headers=headers).models.list()
        with pytest.raises(openai.NotFoundError, match="no episode 9-x"):
            await served.client(served.endpoint.base_url.replace("/v1", "/episodes/9-x/v1")).models.list()
        with pytest.raises(openai.NotFoundError, match="no POST /v1/embeddings"):
            await served.client().embeddings.create(model="any", input="a")
        with pytest.raises(openai.NotFoundError, match="there is no model x; there is policy"):
            await served.client().models.retrieve("x")
        assert not served.engine.asked


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "texts only"),
        ({"messages": [{"content": "a"}]}, "messages[0]", "has no role"),
        ({"n": 0}, "n", "1 to 128"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs", "sampled token only"),
        ({"temperature": -1}, None, "temperature a number"),
        ({"temperature": "hot"}, "temperature", "is a number, got 'hot'"),
        ({"max_tokens": 0}, None, "max_tokens must be"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice", "cannot be forced"),
        ({"tools": ["add"]}, "tools", "list of functions"),
        ({"stream": "yes"}, "stream", "true or false"),
    ],
)
async def test_wrong_requests_are_refused_with_the_field_at_fault(options: Any, param: str, said: str) -> None:
    async with serving(echo) as served:
        with pytest.raises(openai.BadRequestError) as raised:
            await served.client().chat.completions.create(**({"model": "any", "messages": [USER]} | options))
        assert said in str(raised.value) and raised.value.param == param
        assert raised.value.type == "invalid_request_error" and not served.engine.asked


async def test_prompts_that_are_no_text_and_no_ids_are_refused() -> None:
    async with serving(echo) as served:
        for prompt in ("", [], ["a", "b"], [[1, 2], [3]], [1, "a"]):
            with pytest.raises(openai.BadRequestError, match="one text, or one list"):
                await served.client().completions.create(model="any", prompt=prompt)


async def test_an_address_in_use_is_told() -> None:
    async with serving(echo) as served:
        port = int(served.endpoint.base_url.rsplit(":", 1)[1].partition("/")[0])
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            await Endpoint(served.engine, TOKENIZER, port=port).start()  # type: ignore[arg-type]
        assert math.isfinite(port)


async def test_many_clients_are_served_together() -> None:
    async with serving(echo) as served:
        client = served.client()
        made = await asyncio.gather(*(client.chat.completions.create(model="any", messages=[USER]) for _ in range(64)))
        assert {one.choices[0].message.content for one in made} == {"[1]"} and len({one.id for one in made}) == 64
