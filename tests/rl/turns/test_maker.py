"""`EpisodeMaker`: environments and tools, their deadlines and errors, and the ids of every turn."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlmesh.errors import WeightsNotReady
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.rollout.episodes import EpisodeSettings, Tool, TurnResult
from rlmesh.rl.rollout.episodes.deadlines import hanging_calls
from rlmesh.rl.rollout.episodes.maker import EpisodeMaker
from rlmesh.rl.rollout.episodes.plan import EpisodePlan
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask
from rlmesh.rl.rollout.episodes.tools import ToolCall, hermes_calls
from rlmesh.rl.types import Episode
from tests.own_time import HANG_S
from tests.rl.turns.episode_runs import complete
from tests.rl.turns.scripted import ScriptedEngine, make_tokenizer

PARAMS = SamplingParams(100)
CHAT = {"prompt": [{"role": "user", "content": "2+2?"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


@pytest.fixture
def play() -> Iterator[Callable[..., list[Episode]]]:
    makers: list[EpisodeMaker] = []

    def run(
        say: Callable[[str, SamplingParams], str], rows: list[Mapping[str, Any]], *, template: bool = True,
        engine: ScriptedEngine | None = None, **plan: Any,
    ) -> list[Episode]:  # fmt: skip
        tokenizer = make_tokenizer() if template else make_tokenizer(None)
        settings = EpisodeSettings(**plan.pop("settings", {}))
        maker = EpisodeMaker(
            engine or ScriptedEngine(tokenizer, say),  # type: ignore[arg-type]
            tokenizer,
            EpisodePlan(settings, **plan),
        )
        makers.append(maker)
        prompts = [maker._spans.prompt(row["prompt"]) for row in rows]
        tasks = [
            EpisodeTask(number, np.asarray(ids, np.int32), row, seed=number)
            for number, (ids, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        made = maker.make(tasks, PARAMS)
        assert [len(one) for one in made] == [1] * len(rows)
        return [one[0] for one in made]

    yield run
    for maker in makers:
        maker.close()


def text_of(episode: Episode, source: str) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode(turn.ids.tolist()) for turn in episode.turns if turn.source == source]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


@pytest.mark.parametrize("tool", [add, Tool(add_later, name="add")])
def test_a_tool_is_called_and_its_answer_is_the_environments(play: Any, tool: Any) -> None:
    def say(text: str, params: SamplingParams) -> str:
        return "It is 4." if "tool\n4" in text else CALL

    (episode,) = play(say, [CHAT], tools=(tool if isinstance(tool, Tool) else Tool(tool),))
    assert text_of(episode, "policy") == [f"{CALL}<|im_end|>", "It is 4.<|im_end|>"]
    said = text_of(episode, "environment")
    assert said[1] == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert (episode.finish_reason, episode.failure, episode.extras["turns"]) == ("stop", "", 2)
    assert [one["role"] for one in episode.extras["messages"]] == ["user", "assistant", "tool", "assistant"]
    # The mask has the policy's tokens only, with the log-probabilities that the engine gave them.
    assert episode.mask.sum() == sum(len(one) for one in text_of(episode, "policy")) - 2 * (len("<|im_end|>") - 1)
    assert (episode.sampled_log_probs[episode.mask] < 0).all() and not episode.sampled_log_probs[~episode.mask].any()


def test_what_the_engine_continues_is_what_is_recorded(play: Any) -> None:
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda text, _: "It is 4." if "tool\n4" in text else CALL)
    (episode,) = play(engine.say, [CHAT], engine=engine, tools=(Tool(add),))
    assert engine.asked[-1] == episode.ids[: len(engine.asked[-1])].tolist()
    assert engine.asked[-1] == np.concatenate([turn.ids for turn in episode.turns[:-1]]).tolist()


def broken(a: int, b: int) -> int:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (CALL, "error: ZeroDivisionError: no"),
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "error: there is no tool 'sub'; there is add"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "error: add needs the argument b"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}</tool_call>', "error: add has no argument"),
        ("<tool_call>{add}</tool_call>", "error: the tool call is no JSON"),
    ],
)
def test_an_error_of_a_tool_is_told_to_the_policy_or_fails_the_episode(play: Any, call: str, told: str) -> None:
    def say(text: str, params: SamplingParams) -> str:
        return "sorry" if "tool\nerror" in text else call

    tools = (Tool(broken, name="add"),)
    (episode,) = play(say, [CHAT], tools=tools)
    assert told in text_of(episode, "environment")[1] and not episode.failure
    (episode,) = play(say, [CHAT], tools=tools, settings={"tool_errors": "fail"})
    assert episode.failure.startswith("episode 0 turn 1 tool ") and told.removeprefix("error: ") in episode.failure
    assert episode.finish_reason == "failed"


class Guess:
    """The policy guesses a number; the environment says in which direction to go."""

    closed: ClassVar[list[int]] = []

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.secret: int = row["secret"]
        return row.get("hint")

    def step(self, action: str) -> TurnResult:
        if "," in action:
            raise ValueError("one number")
        guess = int(action)
        if guess == self.secret:
            return TurnResult(reward=1.0, done=True)
        return TurnResult("higher" if guess < self.secret else "lower", reward=-0.1)

    def close(self) -> None:
        self.closed.append(self.secret)


def test_tool_calls_of_a_wrong_type_fail_the_episode(play: Any) -> None:
    wrong: Any = lambda text: [text]  # noqa: E731
    (episode,) = play(lambda text, _: "add", [CHAT], tools=(Tool(add),), settings={"tool_calls": wrong})
    assert "episode 0 turn 1: tool_calls returns a list of ToolCall(name, arguments), not 'add'" in episode.failure


def test_calls_are_found_in_linear_time() -> None:
    """A policy that repeats line breaks after the beginning of a call holds up no other episode."""
    began = time.process_time()
    assert hermes_calls("<tool_call>" + "\n" * 100_000) == []
    assert len(hermes_calls("<tool_call>" * 20_000)) == 0
    assert time.process_time() - began < 1.0
    both = f"a {CALL} b <tool_call> {{}} </tool_call></tool_call><tool_call>"
    found = hermes_calls(both)
    assert [one.name for one in found] == ["add", ""] and found[0].arguments == {"a": 2, "b": 2}
    assert [bool(one.fault) for one in found] == [False, True]


def test_a_parser_of_calls_that_hangs_fails_its_episode_alone(play: Any) -> None:
    STUCK.clear()

    def parse(text: str) -> list[ToolCall]:
        if "wait" in text:
            STUCK.wait(HANG_S)
        return []

    def say(text: str, params: SamplingParams) -> str:
        return "wait" if "user\n1<" in text else "go"

    rows = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(3)]
    try:
        episodes = play(say, rows, tools=(Tool(add),), settings={"tool_calls": parse, "turn_timeout_s": 0.5})
    finally:
        STUCK.set()
    assert [one.failure for one in episodes] == ["", "episode 1 turn 1 tool_calls: no answer in 0.5 s", ""]


def test_calls_beside_each_other_share_the_places_of_episodes() -> None:
    """Each group of an asynchronous pipeline is a call of its own."""
    tokenizer, playing, most = make_tokenizer(None), list[int](), list[int]()

    class Alone:
        def reset(self, row: Mapping[str, Any]) -> None:
            playing.append(row["number"])
            most.append(len(playing))
            time.sleep(0.02)

        def step(self, action: str) -> TurnResult:
            playing.pop()
            return TurnResult(done=True)

    engine: Any = ScriptedEngine(tokenizer, lambda *_: "x")
    maker = EpisodeMaker(engine, tokenizer, EpisodePlan(EpisodeSettings(parallel=1), Alone))
    ids = np.asarray(tokenizer("a")["input_ids"], np.int32)
    try:
        calls = [maker.start([EpisodeTask(n, ids, {"prompt": "a", "number": n})], PARAMS) for n in range(4)]
        assert [len(call.result(HANG_S)) for call in calls] == [1] * 4
    finally:
        maker.close()
    assert most == [1] * 4


def guesses(text: str, params: SamplingParams) -> str:
    return str(4 + text.count("higher") - text.count("lower"))


@pytest.mark.parametrize("chat", [True, False])
def test_an_environment_answers_until_it_is_done(play: Any, chat: bool) -> None:
    Guess.closed.clear()
    prompt = CHAT["prompt"] if chat else "Guess: "
    rows = [{"prompt": prompt, "secret": secret, "hint": "Go. "} for secret in (6, 4, 3)]
    episodes = play(guesses, rows, template=chat, environment=Guess)
    assert [one.extras["turns"] for one in episodes] == [3, 1, 2]
    assert [one.extras["return"] for one in episodes] == pytest.approx([0.8, 1.0, 0.9])
    assert [one.finish_reason for one in episodes] == ["stop"] * 3
    assert sorted(Guess.closed) == [3, 4, 6]
    said = text_of(episodes[0], "environment")
    if chat:
        assert said[0].endswith("user\nGo. <|im_end|>\n<|im_start|>assistant\n") and "user\nhigher<" in said[1]
    else:
        assert said == ["Guess: Go. ", "higher", "higher"]


def test_an_environment_of_tokens_sees_and_says_ids(play: Any) -> None:
    tokenizer = make_tokenizer(None)
    seen: list[list[int]] = []

    class Echo:
        tokens = True

        def reset(self, row: Mapping[str, Any]) -> list[int]:
            return [5, 6]

        def step(self, action: list[int]) -> tuple[list[int], float, bool]:
            seen.append(action)
            return [7, 8], 0.5, len(seen) == 2

    (episode,) = play(lambda text, _: "x", [{"prompt": "ab"}], template=False, environment=Echo)
    x = tokenizer("x")["input_ids"][0]
    assert seen == [[x, tokenizer.eos_token_id]] * 2
    assert [turn.ids.tolist() for turn in episode.turns] == [
        [*tokenizer("ab")["input_ids"], 5, 6], [x, 2], [7, 8], [x, 2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "failure"),
    [
        ("raises", "episode 0 turn 1 environment Guess: ValueError: one number"),
        ("wrong", "episode 0 turn 1 environment Wrong: step() returns TurnResult"),
        ("nan", "episode 0 turn 1 environment Nan: the reward of a turn is a finite number"),
        ("messages", "episode 0 turn 1 environment Says: the prompts of this run are texts"),
    ],
)
def test_faults_of_an_environment_fail_its_episode(play: Any, environment: str, failure: str) -> None:
    class Wrong(Guess):
        def step(self, action: str) -> Any:
            return "higher"

    class Nan(Guess):
        def step(self, action: str) -> Any:
            return "higher", float("nan"), False

    class Says(Guess):
        def step(self, action: str) -> Any:
            return [{"role": "user", "content": "a"}], 0.0, False

    kind = {"raises": Guess, "wrong": Wrong, "nan": Nan, "messages": Says}[environment]
    (episode,) = play(lambda *_: "1,2", [{"prompt": "a", "secret": 1}], template=False, environment=kind)
    assert episode.failure.startswith(failure)
    assert episode.extras["turns"] == 1 and episode.mask.sum() == 4


def test_limits_of_turns_and_tokens_end_an_episode(play: Any) -> None:
    row = {"prompt": "Guess: ", "secret": 90}
    (episode,) = play(guesses, [row], template=False, environment=Guess, settings={"max_turns": 3})
    assert (episode.finish_reason, episode.extras["turns"], episode.failure) == ("max_turns", 3, "")
    (episode,) = play(guesses, [row], template=False, environment=Guess, settings={"max_tokens": 11})
    # "4" and its end, "higher", "5" and its end, and one token of the next answer would be too many.
    assert (episode.finish_reason, len(episode) - len("Guess: ")) == ("length", 10)


STUCK = threading.Event()


def sleepy(a: int, b: int) -> int:
    STUCK.wait(HANG_S)
    return a + b


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hanging_tool_in_one_of_64_episodes_harms_no_other(play: Any, kind: str, own_time: Any) -> None:
    STUCK.clear()

    async def sleepy_coroutine(a: int, b: int) -> int:
        await asyncio.sleep(HANG_S)
        return a + b

    async def blocks(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    def say(text: str, params: SamplingParams) -> str:
        if "tool\n4" in text:
            return "It is 4."
        return CALL.replace("add", "wait") if "user\n17" in text else CALL

    hanging: Any = sleepy if kind == "sync" else sleepy_coroutine
    tools = (Tool(add if kind == "sync" else blocks, name="add"), Tool(hanging, name="wait"))
    rows = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(64)]
    began = time.monotonic()
    try:
        episodes = play(say, rows, tools=tools, settings={"turn_timeout_s": 1.0})
        assert own_time.since(began) < 2.0
        assert {number: one.failure for number, one in enumerate(episodes) if one.failure} == {
            17: "episode 17 turn 1 tool wait: no answer in 1 s"
        }
        assert sum(one.extras["turns"] == 2 and one.finish_reason == "stop" for one in episodes) == 63
        assert kind == "async" or hanging_calls() == 1
    finally:
        STUCK.set()
    end = time.monotonic() + HANG_S
    while hanging_calls() and time.monotonic() < end:
        time.sleep(0.01)
    assert not hanging_calls()


def test_a_hanging_engine_and_a_long_episode_are_named(play: Any) -> None:
    tokenizer = make_tokenizer(None)
    engine = ScriptedEngine(tokenizer, lambda *_: "<never>")
    row = {"prompt": "Guess: ", "secret": 90}
    (episode,) = play(
        engine.say, [row], engine=engine, template=False, environment=Guess, settings={"turn_timeout_s": 0.2}
    )
    assert episode.failure == "episode 0 turn 1 engine: no answer in 0.2 s"
    assert engine.cancelled == 1 and len(episode.turns) == 1
    (episode,) = play(
        engine.say, [row], engine=engine, template=False, environment=Guess, settings={"episode_timeout_s": 0.2}
    )
    assert episode.failure == "episode 0 turn 1 engine: the episode took longer than 0.2 s"


def test_an_engine_without_weights_is_no_fault_of_an_episode(play: Any) -> None:
    def say(text: str, params: SamplingParams) -> str:
        raise WeightsNotReady("no weights")

    with pytest.raises(WeightsNotReady):
        play(say, [{"prompt": "Guess: ", "secret": 1}] * 3, template=False, environment=Guess)


def test_the_seed_of_a_turn_depends_on_episode_and_turn() -> None:
    task = EpisodeTask(3, np.zeros(1, np.int32), {}, seed=5)
    seeds = {task.params(PARAMS, turn, 50).seed for turn in range(4)}
    assert len(seeds) == 4 and None not in seeds
    assert task.params(PARAMS, 0, 50).max_tokens == 50
    assert EpisodeTask(3, np.zeros(1, np.int32), {}).params(PARAMS, 0, 50).seed is None


def test_calls_beside_each_other_start_one_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("rlmesh.rl.rollout.endpoint.server")
    started: list[Any] = []

    class SlowEndpoint:
        api_key = "key"

        def __init__(self, *given: Any, **options: Any) -> None:
            pass

        async def start(self) -> None:
            started.append(self)
            await asyncio.sleep(0.05)

        async def stop(self) -> None:
            started.remove(self)

    async def play(self: EpisodeMaker, task: EpisodeTask, params: SamplingParams) -> list[Episode]:
        assert [self._endpoint] == started
        return []

    monkeypatch.setattr(server, "Endpoint", SlowEndpoint)
    monkeypatch.setattr(EpisodeMaker, "_play", play)
    monkeypatch.setenv("OPENAI_API_KEY", "own")
    tokenizer = make_tokenizer()
    engine: Any = ScriptedEngine(tokenizer, lambda text, params: "")
    maker = EpisodeMaker(engine, tokenizer, EpisodePlan(EpisodeSettings(), agent=lambda base_url: None))
    try:
        tasks = [EpisodeTask(0, np.zeros(1, np.int32), {}, seed=0)]
        for call in [maker.start(tasks, PARAMS) for _ in range(4)]:
            call.result(HANG_S)
    finally:
        maker.close()
    assert started == []


@pytest.mark.parametrize(("host", "refused"), [("127.0.0.1", False), ("localhost", False), ("10.0.0.1", True)])
def test_a_key_of_the_user_does_not_leave_the_machine(
    host: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn")

    def faults(agent: Any) -> list[str]:
        run = SimpleNamespace(environment=None, tools=(), agent=agent, episode=EpisodeSettings(host=host))
        return [text for text in EpisodePlan.faults(run) if "OPENAI_API_KEY" in text]

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-judge")
    assert bool(faults(lambda base_url: None)) == refused
    assert faults(lambda base_url, api_key: None) == []
    monkeypatch.delenv("OPENAI_API_KEY")
    assert faults(lambda base_url: None) == []


@pytest.mark.parametrize("own", ["", "sk-of-a-judge"])
def test_a_key_of_the_user_stays_and_a_client_finds_one(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent takes a base URL only: its client reads the key from the environment."""
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://judge.example/v1")
    if own:
        monkeypatch.setenv("OPENAI_API_KEY", own)
    else:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    seen: list[tuple[str, str]] = []

    def agent(base_url: str) -> str:
        seen.append((os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            complete(base_url, "wrong", "ab")
        if own:  # it opens no more than the URLs of episodes
            with pytest.raises(urllib.error.HTTPError, match="401"):
                complete(re.sub("/episodes/[^/]+", "", base_url), own, "ab")
        return complete(base_url, os.environ["OPENAI_API_KEY"], "ab")

    def explicit(base_url: str, api_key: str) -> str:
        return complete(base_url, api_key, "ab")

    tokenizer = make_tokenizer(None)
    for function in (agent, explicit):
        engine: Any = ScriptedEngine(tokenizer, lambda text, params: f"{text}!")
        maker = EpisodeMaker(engine, tokenizer, EpisodePlan(EpisodeSettings(), agent=function))
        try:
            ((episode,),) = maker.make([EpisodeTask(0, np.ones(1, np.int32), {}, seed=0)], PARAMS)
        finally:
            maker.close()
        assert (episode.failure, episode.extras["result"]) == ("", "ab!")
        assert os.environ.get("OPENAI_API_KEY", "") == own, "as it was before"
    ((key, url),) = seen
    assert url == "http://judge.example/v1" and (key == own or (not own and len(key) >= 43))
