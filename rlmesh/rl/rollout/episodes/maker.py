"""`EpisodeMaker`: plays episodes with an engine of this process, many at a time, each with its own deadlines."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlmesh.errors import UsageError
from rlmesh.rl.engines.rollout import RolloutEngine, SamplingParams
from rlmesh.rl.rollout.episodes.deadlines import EpisodeThread, PlaceTimeout
from rlmesh.rl.rollout.episodes.partners import EnvironmentPartner, EpisodeFailed, Partner, ToolPartner
from rlmesh.rl.rollout.episodes.plan import KEY, EpisodePlan, is_local, own_key
from rlmesh.rl.rollout.episodes.recording import RecordedTurn, Recording
from rlmesh.rl.rollout.episodes.tasks import EpisodeTask
from rlmesh.rl.rollout.episodes.turn_sampler import TurnSampler
from rlmesh.rl.types import Episode

if TYPE_CHECKING:
    from rlmesh.rl.rollout.endpoint.server import Endpoint

__all__ = ["EpisodeMaker"]

CLOSE_S = 10.0


class EpisodeMaker:
    """Plays episodes with one engine. Its event loop, and the endpoint for agents, run until `close`.

    Args:
        engine: the engine that samples the turns.
        tokenizer: a tokenizer of transformers.
        plan: the run's plan for episodes.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: Any, plan: EpisodePlan) -> None:
        self.plan = plan
        self._spans = plan.spans(tokenizer)
        self._parse = plan.parser()
        self._engine, self._tokenizer = engine, tokenizer
        self._sampler = TurnSampler(engine)
        self._endpoint: Endpoint | None = None
        self._starts = asyncio.Lock()
        self._room = asyncio.Semaphore(plan.settings.parallel)
        """Shared by all calls of `make` and `start`, which run concurrently."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlmesh-episodes", daemon=True)
        self._thread.start()

    def make(self, tasks: Sequence[EpisodeTask], params: SamplingParams) -> list[list[Episode]]:
        """Play episodes; returns one episode per task, or several if its agent opened branches.

        An episode that fails raises no error, but has an `Episode.failure`.

        Args:
            params: parameters of each turn, with the seed of the task in place of their own.

        Raises:
            UsageError, WeightsNotReady: raised by the engine; all episodes of the call are given up.
        """
        return self.start(tasks, params).result()

    def start(self, tasks: Sequence[EpisodeTask], params: SamplingParams) -> Future[list[list[Episode]]]:
        """As `make`, but returns a future at once. ``cancel()`` gives the episodes up."""
        return asyncio.run_coroutine_threadsafe(self._play_all(tasks, params), self._loop)

    def close(self) -> None:
        """End the endpoint and the event loop. Running episodes are given up."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._sampler.close()
        if not self._thread.is_alive():
            self._loop.close()

    # On the loop.

    async def _end(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.stop()
            if os.environ.get(KEY) == self._endpoint.api_key:
                del os.environ[KEY]
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    async def _play_all(self, tasks: Sequence[EpisodeTask], params: SamplingParams) -> list[list[Episode]]:
        if self.plan.agent is not None:
            async with self._starts:  # calls run concurrently
                if self._endpoint is None:
                    await self._start_endpoint()

        async def one(task: EpisodeTask) -> list[Episode]:
            async with self._room:
                return await self._play(task, params)

        playing = [asyncio.ensure_future(one(task)) for task in tasks]
        try:
            return list(await asyncio.gather(*playing))
        finally:
            for each in playing:
                each.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _start_endpoint(self) -> None:
        from rlmesh.rl.rollout.endpoint.server import Endpoint

        settings, own = self.plan.settings, own_key()
        allowed = own if is_local(settings.host) else ""
        endpoint = Endpoint(
            self._engine, self._tokenizer, max_tokens=self.plan.turn_tokens, host=settings.host, port=settings.port,
            own_key=allowed, timeout_s=settings.turn_timeout_s, parse=self._parse, sampler=self._sampler,
            template=self.plan.template,
        )  # fmt: skip
        await endpoint.start()
        self._endpoint = endpoint
        # OpenAI's client takes its key from the environment, so an agent needs only a base URL. A user's own key is
        # kept, for other clients of this process, and is accepted at the URLs of episodes too.
        if not own:
            os.environ[KEY] = endpoint.api_key

    async def _play(self, task: EpisodeTask, params: SamplingParams) -> list[Episode]:
        if self._endpoint is not None:
            from rlmesh.rl.rollout.episodes.agents import play_agent

            return await play_agent(self.plan, self._endpoint, self._spans, task, params)
        game = _Game(self, task, params)
        limit = self.plan.settings.episode_timeout_s
        failure = ""
        timeout = asyncio.timeout(limit)
        try:
            async with timeout:
                await game.play()
        except (PlaceTimeout, EpisodeFailed) as error:
            failure = str(error)
        except TimeoutError:
            if not timeout.expired():
                raise
            failure = f"{game.place}: the episode took longer than {limit:g} s"
        finally:
            await game.end()
        return game.episodes(failure)

    def _partner(self, task: EpisodeTask, thread: EpisodeThread) -> Partner:
        settings, chat = self.plan.settings, self.plan.chat_of(task.row) is not None
        if self.plan.environment is not None:
            return EnvironmentPartner(
                self.plan.environment, chat=chat, thread=thread, settings=settings, episode=task.name
            )
        return ToolPartner(self.plan.tools, self._parse, chat=chat, thread=thread, settings=settings, episode=task.name)


class _Game:
    """An episode with an environment or tools.

    Attributes:
        place: the present place in the episode, for errors.
    """

    def __init__(self, maker: EpisodeMaker, task: EpisodeTask, params: SamplingParams) -> None:
        self._maker, self._task, self._params = maker, task, params
        self._spans, self._plan = maker._spans, maker.plan
        self._thread = EpisodeThread(f"rlmesh-{task.name}")
        self._partner = maker._partner(task, self._thread)
        self._recording = Recording()
        self._messages: list[Mapping[str, Any]] = []
        self._prompt: list[int] = task.prompt.tolist()
        self._return: float | None = None
        self._finish = ""
        self.place = task.name

    async def play(self) -> None:
        task, plan = self._task, self._plan
        self.place = f"{task.name} turn 0"
        chat = plan.chat_of(task.row)
        self._messages = chat or [{"role": "user", "content": str(task.row.get(plan.prompt_key, ""))}]
        before = self._begin(chat, await self._partner.reset(task.row))
        parent = self._recording.root
        for turn in range(1, plan.settings.max_turns + 1):
            left = len(self._prompt) + plan.settings.max_tokens - len(parent.ids) - len(before)
            if left < 1:
                self._finish = "length"
                return
            self.place = f"{task.name} turn {turn} engine"
            sample = await self._maker._sampler.sample(
                [*parent.ids, *before], task.params(self._params, turn - 1, left),
                timeout_s=plan.settings.turn_timeout_s, place=self.place,
            )  # fmt: skip
            parent = self._recording.add(parent, before, sample, None)
            text = self._spans.said(sample.token_ids)
            self._messages = [*self._messages, {"role": "assistant", "content": text}]
            if sample.finish_reason == "abort":
                return
            self.place = f"{task.name} turn {turn} partner"
            result = await self._partner.step(sample.token_ids if self._partner.tokens else text, turn)
            if self._plan.environment is not None:
                self._return = (self._return or 0.0) + result.reward
            if result.done:
                return
            before = self._continue(chat is not None, parent, result.said)
        self._finish = "max_turns"

    def _begin(self, chat: Any, said: Any) -> list[int]:
        """The token ids before the first turn of the policy."""
        if said is None:
            return self._prompt
        if self._partner.tokens:
            self._prompt = [*self._prompt, *said]
        elif chat is None:
            self._messages = [*self._messages, {"role": "user", "content": said}]
            self._prompt = [*self._prompt, *self._spans.text(said)]
        else:
            self._messages = [*self._messages, *_as_messages(said)]
            try:
                self._prompt = self._spans.prompt(self._messages)
            except UsageError as error:
                raise EpisodeFailed(f"{self.place}: {error}") from error
        return self._prompt

    def _continue(self, chat: bool, parent: RecordedTurn, said: Any) -> list[int]:
        """The token ids between a turn of the policy and its next turn."""
        if self._partner.tokens:
            return list(said or ())
        new = [] if said is None else _as_messages(said)
        before, self._messages = self._messages[:-1], [*self._messages, *new]
        if not chat:
            return [] if said is None else self._spans.text(said)
        if not new:
            raise EpisodeFailed(f"{self.place}: in a chat, an environment must answer with words, or with done=True")
        try:
            return self._spans.extension(before, parent.turns[-1].ids.tolist(), new)
        except UsageError as error:
            raise EpisodeFailed(f"{self.place}: {error}") from error

    async def end(self) -> None:
        """Close the partner; its errors are ignored, since the episode is over."""
        with suppress(PlaceTimeout, EpisodeFailed):
            await self._partner.close()
        self._thread.close()

    def episodes(self, failure: str) -> list[Episode]:
        extras: dict[str, Any] = {"messages": self._messages}
        if self._return is not None:
            extras["return"] = self._return
        return self._recording.episodes(
            self._task.prompt, extras, finish_reason="failed" if failure else self._finish, failure=failure
        )


def _as_messages(said: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else [dict(one) for one in said]
