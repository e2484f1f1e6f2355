"""`VllmEngine`: vLLM in this process, on one thread."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.rl.engines.growing import Growing
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

__all__ = ["VllmEngine"]

STEP_S = 5.0
"""Seconds to wait for the end of the running step."""
_NEXT, _TURN = threading.Lock(), threading.Lock()


class VllmEngine(VllmBase):
    """vLLM as a library: its engine, scheduler and (without tensor parallelism) worker are in this process.

    vLLM 0.25, for torch 2.11, works too.

    Requests of several threads are sampled together. Only one thread of the engine calls vLLM.

    Args:
        model: a folder in the format of transformers; no tokenizer is needed, since tokens go in and out.
        pause_mode: treatment of running requests when weights arrive.
        version: the version of the weights in ``model``; None: serve nothing before the first push.
        who: name in errors, until a receiver sets its own.
        probe_token_ids: the fixed prompt that is probed after each push.
        pause_timeout_s: limit for running requests to delay a push, with ``pause_mode="wait"``.
        arguments: further arguments of vLLM's `EngineArgs`: ``dtype``, ``max_model_len``, ``tensor_parallel_size``, …

    Raises:
        any error of vLLM's start.
    """

    def __init__(
        self, model: str, *, pause_mode: PauseMode = "keep", version: int | None = None, who: str = "vLLM",
        probe_token_ids: Sequence[int] | None = None, pause_timeout_s: float = 60.0, **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            model, pause_mode=pause_mode, version=version, who=who, probe_token_ids=probe_token_ids,
            pause_timeout_s=pause_timeout_s,
        )  # fmt: skip
        # Synchronous steps: an asynchronous one that runs while weights arrive would mix old and new weights.
        self._arguments = engine_args(model, {"async_scheduling": False, **arguments}, in_process=True)
        self._serving_version = version
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._running: dict[str, tuple[Growing, RequestBatch]] = {}
        self._kept: list[tuple[Growing, RequestBatch]] = []
        self._clock: Callable[[], float] = time.monotonic
        self._soonest = math.inf
        """The time at which a response that runs is over."""
        self._halted = False
        self._idle = threading.Event()
        """Set when no request runs."""
        self._engine: Any = None
        started: Future[tuple[bool, str]] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"rlmesh-vllm-{who}", daemon=True)
        self._thread.start()
        same_process, device = self._answer("start", started, START_S)
        self._carries_mass = all(self.workers("rlmesh_carry_mass"))
        self._sink = Sink(self, device, same_process=same_process, halt_s=pause_timeout_s)

    # On the engine's thread.

    def _run(self, started: Future[tuple[bool, str]]) -> None:
        try:
            with _alone():
                found = self._start()
            started.set_result(found)
        except BaseException as error:
            started.set_exception(error)
            return
        while True:
            idle = not self._running or self._halted
            if not self._running:
                self._idle.set()
            try:
                job = self._jobs.get() if idle else self._jobs.get_nowait()
            except queue.Empty:
                try:
                    with _alone():
                        self._step()
                except Exception as error:
                    self._break(error)
                continue
            if job is None:
                break
            with _alone():
                job()
        with _alone():
            self._stop()

    def _start(self) -> tuple[bool, str]:
        import torch
        from vllm import EngineArgs, LLMEngine

        others = children()
        self._engine = LLMEngine.from_engine_args(EngineArgs(**self._arguments))
        self._children = children(besides=others)
        alone = self._engine.vllm_config.parallel_config.world_size == 1
        on_gpu = alone and torch.cuda.is_available()
        return alone, f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"

    def _stop(self) -> None:
        self._fail(UsageError(f"{self.gate.who} was closed"))
        self._idle.set()
        self._engine.engine_core.shutdown()
        self._engine.renderer.shutdown()
        self._engine = None
        forget(self._children)

    def _step(self) -> list[Any]:
        """Make one step of vLLM; returns outputs that belong to no response."""
        others = []
        for output in self._engine.step():
            found = self._running.get(output.request_id)
            if found is None:
                others.append(output)
                continue
            row, batch = found
            completion = output.outputs[0]
            assert self._serving_version is not None
            row.add(completion.token_ids, log_probs_of(completion), self._serving_version, masses_of(row, completion))
            if row.params.time_limit_s is not None:
                row.begin_time(self._clock())
                self._soonest = min(self._soonest, row.ends_at)
            if output.finished or row.finish_reason is not None:
                del self._running[output.request_id]
                if not output.finished:
                    self._engine.abort_request([output.request_id])  # a stop text ended the response
                elif row.finish_reason is None:
                    row.finish(completion.finish_reason)
                batch.ended()
        self._end_late()
        return others

    def _end_late(self) -> None:
        """End the responses whose time is over."""
        if (now := self._clock()) < self._soonest:
            return
        for number, (row, batch) in list(self._running.items()):
            if row.ends_at <= now:
                del self._running[number]
                self._engine.abort_request([number])
                row.finish("time")
                batch.ended()
        self._soonest = min((row.ends_at for row, _ in self._running.values()), default=math.inf)

    def _add(self, row: Growing, batch: RequestBatch) -> None:
        number = str(next(self._numbers))
        self._engine.add_request(number, tokens_of(row.context), stretch_params(row, self._ends))
        self._running[number] = (row, batch)
        self._soonest = min(self._soonest, row.ends_at)
        self._idle.clear()

    def _take_out(self) -> list[tuple[Growing, RequestBatch]]:
        """End all running requests where they are."""
        out = list(self._running.values())
        self._engine.abort_request(list(self._running))
        self._running.clear()
        return out

    def _fail(self, error: Exception) -> None:
        for _, batch in [*self._take_out(), *self._kept]:
            batch.fail(error)
        self._kept = []

    def _break(self, error: Exception) -> None:
        """Handle an error of vLLM itself in a step: its state is unknown, so the engine has no version afterwards."""
        self.gate.set_version(None, f"vLLM failed in a step: {type(error).__name__}: {error}")
        for _, batch in [*self._running.values(), *self._kept]:
            batch.fail(error)
        self._running.clear()
        self._kept = []

    def _halt(self, mode: PauseMode) -> None:
        for row, batch in self._take_out():
            if mode == "keep" and can_resume(row):
                self._kept.append((row, batch))
            else:
                row.finish("abort")
                batch.ended()
        self._halted = True

    def _go_on(self, version: int | None) -> None:
        self._serving_version, self._halted = version, False
        kept, self._kept = self._kept, []
        for row, batch in kept:
            self._add(row, batch)
        self._end_late()  # before new weights sample for those whose time passed in the pause

    def _lose(self, error: Exception) -> None:
        self._fail(error)
        self._serving_version, self._halted = None, False

    def _probed(self, sequences: Sequence[Sequence[int]], timeout_s: float) -> list[list[float]]:
        deadline = time.monotonic() + timeout_s
        names = [f"probe-{next(self._numbers)}" for _ in sequences]
        for name, tokens in zip(names, sequences, strict=True):
            self._engine.add_request(name, tokens_of(tokens), probe_params())
        found: dict[str, list[float]] = {}
        while len(found) < len(names):
            if time.monotonic() > deadline:
                self._engine.abort_request(names)
                raise TimeoutError(f"{self.gate.who}: log-probs took longer than {timeout_s:g} s")
            found.update({output.request_id: prompt_log_probs(output) for output in self._step() if output.finished})
        return [found[name] for name in names]

    # From other threads.

    def _post(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queue a function for the engine's thread."""
        answer: Future[T] = Future()

        def job() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function(*args))
            except BaseException as error:
                answer.set_exception(error)

        with self._asking:
            self._check_open()
            self._jobs.put(job)
        return answer

    def _call(self, what: str, function: Callable[..., T], *args: Any, timeout_s: float = CALL_S) -> T:
        return self._answer(what, self._post(function, *args), timeout_s)

    def _submit(self, batch: RequestBatch, timeout_s: float) -> None:
        def add() -> None:
            for row in batch.rows:
                self._add(row, batch)

        self._call("take requests", add, timeout_s=timeout_s)

    def _withdraw(self, batch: RequestBatch) -> None:
        def remove() -> None:
            mine = [number for number, (_, of) in self._running.items() if of is batch]
            self._engine.abort_request(mine)
            for number in mine:
                del self._running[number]
            self._kept = [kept for kept in self._kept if kept[1] is not batch]

        with suppress(UsageError):
            self._post(remove)

    def halt(self, mode: PauseMode, timeout_s: float) -> None:
        # Wait here, not on the engine's thread, which must run other work meanwhile.
        if mode == "wait" and not self._idle.wait(timeout_s):
            raise self._busy(len(self._running), timeout_s)
        self._call("pause", self._halt, mode, timeout_s=timeout_s)

    def go_on(self, version: int | None) -> None:
        self._call("go on", self._go_on, version)

    def lose(self, error: Exception) -> None:
        self._call("give requests up", self._lose, error)

    def workers(self, method: str, *args: Any) -> list[Any]:
        return self._call(f"answer {method}", lambda: list(self._engine.collective_rpc(method, args=args)))

    def probed(self, sequences: Sequence[Sequence[int]], timeout_s: float) -> list[list[float]]:
        return self._call("give log-probs", self._probed, sequences, timeout_s, timeout_s=timeout_s + STEP_S)

    def drop_caches(self) -> None:
        if not self._call("drop caches", lambda: self._engine.reset_prefix_cache(reset_running_requests=True)):
            raise WeightSyncError(f"{self.gate.who} could not drop what earlier weights computed")

    def label(self, version: int) -> None:
        set_version = getattr(self._engine, "set_weight_version", None)
        if set_version is not None:  # older versions of vLLM have no such method
            self._call("take a version", lambda: set_version(str(version)))

    def _set_asleep(self, level: SleepLevel | None) -> None:
        if level is None:
            self._call("wake", lambda: self._engine.wake_up())
        else:
            self._call("sleep", lambda: self._engine.sleep(level=level))

    def _end(self) -> None:
        self._jobs.put(None)


@contextmanager
def _alone() -> Iterator[None]:
    """Exclusive use of vLLM: it keeps state of a forward pass in global variables, so its engines take turns."""
    with _NEXT:  # fair: an engine that steps continuously waits for others that wait
        _TURN.acquire()
    try:
        yield
    finally:
        _TURN.release()
