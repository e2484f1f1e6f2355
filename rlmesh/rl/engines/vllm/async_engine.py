"""`AsyncVllmEngine`: vLLM in a child process, while this process does other work."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.rl.engines.growing import Growing, completes
from rlmesh.rl.engines.rollout import PauseMode, SleepLevel
from rlmesh.rl.engines.vllm.base import CALL_S, START_S, Sink, T, VllmBase, engine_args
from rlmesh.rl.engines.vllm.children import children, forget
from rlmesh.rl.engines.vllm.requests import (
    RequestBatch,
    can_resume,
    log_probs_of,
    masses_of,
    probe_params,
    prompt_log_probs,
    stretch_params,
    tokens_of,
)

__all__ = ["AsyncVllmEngine"]

STOP_S = 5.0


@dataclass(eq=False)
class Stretch:
    """A response that vLLM is sampling.

    Attributes:
        tokens: number of tokens so far.
        keep: if a pause ends it, it continues afterwards.
        resumes: it can do so.
        stopped: a stop text has ended it.
        late: its time limit has ended it.
        timer: of its time limit, once it has begun.
    """

    name: str
    batch: RequestBatch
    tokens: int = 0
    keep: bool = False
    resumes: bool = True
    stopped: bool = False
    late: bool = False
    timer: asyncio.TimerHandle | None = None


class AsyncVllmEngine(VllmBase):
    """vLLM's `AsyncLLM`. Scheduler and workers are separate processes, so that this process does not wait for their
    steps, and a busy loop here does not delay them.

    Arguments are those of `VllmEngine`. A separate loop on a separate thread calls vLLM.
    """

    def __init__(
        self, model: str, *, pause_mode: PauseMode = "keep", version: int | None = None, who: str = "vLLM",
        probe_token_ids: Sequence[int] | None = None, pause_timeout_s: float = 60.0, **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            model, pause_mode=pause_mode, version=version, who=who, probe_token_ids=probe_token_ids,
            pause_timeout_s=pause_timeout_s,
        )  # fmt: skip
        self._arguments = engine_args(model, arguments, in_process=False)
        self._numbers = itertools.count()
        self._stretches: dict[asyncio.Task[None], Stretch] = {}
        self._kept: list[tuple[Growing, RequestBatch]] = []
        self._halted = False
        self._background: set[asyncio.Task[None]] = set()
        """Tasks that nobody waits for."""
        self.on_lost: Callable[[str], object] = lambda why: None
        """Called on the engine's thread if vLLM's process ends by itself, before the requests fail. The engine cannot
        sample afterwards."""
        self._is_lost = False
        self._engine: Any = None
        self._loop = asyncio.new_event_loop()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"rlmesh-vllm-{who}", daemon=True)
        self._thread.start()
        self._answer("start", started, START_S)
        self._carries_mass = all(self.workers("rlmesh_carry_mass"))
        # Weights reach the workers through host memory, on CPUs and GPUs alike.
        self._sink = Sink(self, "cpu", same_process=False, halt_s=pause_timeout_s)
        if version is not None:
            self.label(version)

    def _run(self, started: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)

        async def start() -> None:
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if not hasattr(AsyncLLM, "update_weight_version"):
                raise UsageError(
                    "AsyncVllmEngine needs vLLM 0.32 or newer, which says of each token what weights it is of; this is "
                    f"{vllm.__version__}. VllmEngine runs on it"
                )
            others = children()
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
            self._children = children(besides=others)
            for child in self._children:
                self._loop.add_reader(child.sentinel, self._child_ended, child)

        try:
            self._loop.run_until_complete(start())
        except BaseException as error:
            self._loop.close()
            started.set_exception(error)
            return
        started.set_result(None)
        self._loop.run_forever()
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    def _child_ended(self, child: BaseProcess) -> None:
        child.join(0)
        self._lost(f"vLLM's process {child.name} (pid {child.pid}) exited with code {child.exitcode}")

    def _look_at(self, error: Exception) -> None:
        """Note that vLLM is lost, if an error says so: vLLM reports this before its process has ended."""
        if self._engine is not None and self._engine.errored:
            self._lost(f"vLLM's process is gone: {type(error).__name__}: {error}")

    def _lost(self, why: str) -> None:
        """Note once that vLLM is lost, and call `on_lost` before any request fails."""
        if self._is_lost:
            return
        self._is_lost = True
        self._watch_no_longer()
        self.gate.set_version(None, f"{self.gate.who}: {why}")
        self.on_lost(f"{self.gate.who}: {why}")

    def _watch_no_longer(self) -> None:
        for child in self._children:
            self._loop.remove_reader(child.sentinel)

    async def _stop(self) -> None:
        self._watch_no_longer()
        error = UsageError(f"{self.gate.who} was closed")
        for batch in [*(stretch.batch for stretch in self._stretches.values()), *(batch for _, batch in self._kept)]:
            batch.fail(error)
        self._engine.shutdown(timeout=STOP_S)
        self._engine = None
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
        forget(self._children)

    # On the engine's loop.

    async def _add(self, row: Growing, batch: RequestBatch) -> None:
        """Start a stretch; it is in vLLM when this returns. A response whose time passed in a pause ends instead."""
        if row.ends_at <= self._loop.time():
            row.finish("time")
            batch.ended()
            return
        name = str(next(self._numbers))
        outputs = await self._engine.add_request(name, tokens_of(row.context), stretch_params(row, self._ends))
        stretch = Stretch(name, batch, resumes=can_resume(row))
        task = self._loop.create_task(self._follow(row, stretch, outputs))
        self._stretches[task] = stretch
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        stretch = self._stretches.pop(task)
        if stretch.timer is not None:
            stretch.timer.cancel()

    def _time(self, row: Growing, stretch: Stretch) -> None:
        """Let the time limit of a response count, from its first token on."""
        row.begin_time(self._loop.time())
        if stretch.timer is None and row.ends_at < math.inf:
            stretch.timer = self._loop.call_at(row.ends_at, self._end_late, stretch)

    def _end_late(self, stretch: Stretch) -> None:
        stretch.late = True

        async def abort() -> None:
            with suppress(Exception):  # a loss of vLLM, which `_follow` sees too
                await self._engine.abort(stretch.name)

        task = self._loop.create_task(abort())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _follow(self, row: Growing, stretch: Stretch, outputs: Any) -> None:
        parts: list[Any] = []
        batch = stretch.batch
        try:
            while True:
                output = outputs.get_nowait() or await outputs.get()
                parts.append(output.outputs[0])
                stretch.tokens += len(parts[-1].token_ids)
                Growing.sampled += len(parts[-1].token_ids)
                self._time(row, stretch)
                if output.finished:
                    break
                if row.decode is not None and not stretch.stopped:
                    drawn = [token for part in parts for token in part.token_ids]
                    stretch.stopped = _completes_any(row, drawn, len(parts[-1].token_ids))
                    if stretch.stopped:
                        await self._engine.abort(stretch.name)
            last = parts[-1]
            _take_spans(row, parts, last.weight_versions or ())
        except Exception as error:
            if self._engine is None:
                self.gate.set_version(None, f"{self.gate.who} was closed: {type(error).__name__}: {error}")
            self._look_at(error)
            batch.fail(error)
            return
        if batch.withdrawn:
            return
        if row.finish_reason is not None:  # a stop text has ended the stretch
            batch.ended()
        elif last.finish_reason != "abort" or not stretch.keep or stretch.late:
            row.finish("time" if last.finish_reason == "abort" and stretch.late else last.finish_reason)
            batch.ended()
        elif self._halted:
            self._kept.append((row, batch))
        else:
            await self._put_back([(row, batch)])  # the pause that ended the stretch was given up

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._engine, method)(*args, **kwargs)

    async def _submitted(self, batch: RequestBatch) -> None:
        try:
            for row in batch.rows:
                await self._add(row, batch)
        except Exception as error:
            self._look_at(error)
            raise

    async def _withdrawn(self, batch: RequestBatch) -> None:
        batch.withdrawn = True
        self._kept = [kept for kept in self._kept if kept[1] is not batch]
        await self._engine.abort([each.name for each in self._stretches.values() if each.batch is batch])

    async def _halt(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop all requests; see `halt`. vLLM's own "wait" cannot be used: it does not start requests that wait for a
        place in its batch, so they would never end."""
        if mode == "wait" and not await self._drained(timeout_s):
            raise self._busy(len(self._stretches), timeout_s)
        for stretch in self._stretches.values():
            stretch.keep = mode == "keep" and stretch.resumes
        self._halted = True
        if not self._stretches:
            return  # no request is admitted, and none runs
        try:
            async with asyncio.timeout(timeout_s):
                # Not pause_generation(), which sleeps for 20 ms so that outputs come first: here they are awaited.
                await self._engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
                await self._drained(timeout_s)
                # No request is admitted, and none is left: the probe of a push may run.
                await self._engine.resume_generation()
        except BaseException as error:
            self._give_up_halt()
            if not isinstance(error, TimeoutError):
                raise
            raise TimeoutError(
                f"{self.gate.who}: vLLM did not stop sampling within {timeout_s:g} s ({len(self._stretches)} samples "
                "are still with it). It is stopped, hangs, or makes long steps: see the stacks of its processes"
            ) from None

    async def _drained(self, timeout_s: float) -> bool:
        """Wait until all stretches have ended; returns false on timeout."""
        deadline = self._loop.time() + timeout_s
        while self._stretches and self._loop.time() < deadline:
            await asyncio.wait(list(self._stretches), timeout=deadline - self._loop.time())
        return not self._stretches

    def _give_up_halt(self) -> None:
        """Resume vLLM in the background after a failed halt, as soon as vLLM answers (it may never do)."""
        self._halted = False
        kept, self._kept = self._kept, []
        if self._engine is None:  # closed in the meantime
            return

        async def resume() -> None:
            try:
                await self._engine.resume_generation()
            except Exception as error:
                for _, batch in kept:
                    batch.fail(error)
            else:
                await self._put_back(kept)

        task = self._loop.create_task(resume())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _put_back(self, kept: Sequence[tuple[Growing, RequestBatch]]) -> None:
        for row, batch in kept:
            try:
                await self._add(row, batch)
            except Exception as error:
                batch.fail(error)

    async def _go_on(self) -> None:
        self._halted = False
        kept, self._kept = self._kept, []
        await self._put_back(kept)

    async def _lose(self, error: Exception) -> None:
        self._halted = False
        kept, self._kept = self._kept, []
        for _, batch in kept:
            batch.fail(error)

    async def _probe(self, tokens: Sequence[int]) -> list[float]:
        name, last = f"probe-{next(self._numbers)}", None
        async for output in self._engine.generate(tokens_of(tokens), probe_params(), name):
            last = output
        return prompt_log_probs(last)

    async def _probed(self, sequences: Sequence[Sequence[int]], timeout_s: float) -> list[list[float]]:
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*(self._probe(tokens) for tokens in sequences)))
        except TimeoutError:
            raise TimeoutError(f"{self.gate.who}: log-probs took longer than {timeout_s:g} s") from None

    # From other threads.

    def _post(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._asking:
            try:
                self._check_open()
            except UsageError:
                work.close()
                raise
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, what: str, work: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        return self._answer(what, self._post(work), timeout_s)

    def _submit(self, batch: RequestBatch, timeout_s: float) -> None:
        self._call("take requests", self._submitted(batch), timeout_s)

    def _withdraw(self, batch: RequestBatch) -> None:
        with suppress(UsageError):
            self._post(self._withdrawn(batch))

    def halt(self, mode: PauseMode, timeout_s: float) -> None:
        # _halt() has its own timeout; this longer one is for a loop that is stuck.
        self._call("pause", self._halt(mode, timeout_s), 2 * timeout_s + STOP_S)

    def go_on(self, version: int | None) -> None:
        self._call("go on", self._go_on())

    def lose(self, error: Exception) -> None:
        self._call("give requests up", self._lose(error))

    def workers(self, method: str, *args: Any) -> list[Any]:
        found: list[Any] = self._call(f"answer {method}", self._ask("collective_rpc", method, args=args))
        return found

    def probed(self, sequences: Sequence[Sequence[int]], timeout_s: float) -> list[list[float]]:
        return self._call("give log-probs", self._probed(sequences, timeout_s), timeout_s + STOP_S)

    def drop_caches(self) -> None:
        if not self._call("drop caches", self._ask("reset_prefix_cache", reset_running_requests=True)):
            raise WeightSyncError(f"{self.gate.who} could not drop what earlier weights computed")

    def label(self, version: int) -> None:
        self._call("take a version", self._ask("update_weight_version", str(version)))

    def _set_asleep(self, level: SleepLevel | None) -> None:
        if level is None:
            self._call("wake", self._ask("wake_up"))
        else:
            self._call("sleep", self._ask("sleep", level=level))

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def _take_spans(row: Growing, parts: Sequence[Any], spans: Sequence[Any]) -> None:
    """Add the parts of a stretch. vLLM tells the version of each token."""
    tokens = [token for part in parts for token in part.token_ids]
    log_probs = [log_prob for part in parts for log_prob in log_probs_of(part)]
    if sum(span.end - span.start for span in spans) != len(tokens):
        raise WeightSyncError(f"vLLM gave {len(tokens)} tokens, and versions of {spans}")
    masses = [mass for part in parts for mass in masses_of(row, part)]
    for span in spans:
        at = slice(span.start, span.end)
        row.add(tokens[at], log_probs[at], int(span.version), masses[at])


def _completes_any(row: Growing, drawn: Sequence[int], new: int) -> bool:
    """True if one of the last ``new`` tokens of a stretch completes a stop text."""
    assert row.decode is not None
    before = len(row.tokens) + len(drawn) - new
    tokens = [*row.tokens, *drawn]
    return any(completes(tokens[: end + 1], row.params.stop, row.decode) for end in range(before, len(tokens)))
