"""`TransformersEngine`: a rollout engine that needs only torch and transformers, and no GPU.

It samples token by token, with a key-value cache. One thread samples all requests together; it exists as long as there
are requests. When a response ends, the next request takes its place (`rlmesh.rl.engines.continuous`). The
``pause_mode`` decides about running requests when weights arrive: they end (``abort``), they continue with the new
weights and a recomputed cache (``keep``), or the new weights wait until the requests have ended (``wait``).

The switch to new weights (the *flip*) needs the engine's version gate (`rlmesh.VersionGate`) for itself. With ``abort``
and ``keep`` the engine holds the gate for one token at a time, so a flip happens between two tokens; with ``wait`` it
holds the gate until all running requests have ended.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from rlmesh import VersionGate, WeightSink
from rlmesh.errors import UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.continuous import ContinuousBatch
from rlmesh.rl.engines.decode_graphs import graphs_for
from rlmesh.rl.engines.grouped_attention import use_grouped_attention
from rlmesh.rl.engines.growing import Growing, decoder
from rlmesh.rl.engines.lora import LoraOptions, add_adapter
from rlmesh.rl.engines.pending import GivenUp, PendingSample, SampleFuture
from rlmesh.rl.engines.prompts import checked_params, checked_rows, end_tokens, vocabulary_of
from rlmesh.rl.engines.rollout import OnTokens, PauseMode, Sample, SamplingParams, SleepLevel
from rlmesh.rl.engines.sleeping_sink import SleepingSink

__all__ = ["TransformersEngine"]

GATE_S = 0.2
"""Seconds after which a wait for the gate is interrupted, to check for requests that were given up."""
CLOSE_S = 60.0
"""Seconds that `TransformersEngine.close` waits for the thread that samples."""


class TransformersEngine:
    """A rollout engine of torch and transformers; see the module, and `RolloutEngine` for its methods.

    Args:
        model: a causal language model of transformers, in eval mode, on a CPU or a GPU.
        pad_token_id: padding of shorter prompts; it is masked, so any existing token will do.
        stop_token_ids: tokens that end a response; None: the end tokens of the model's configuration.
        tokenizer: an object with ``decode``, for stop texts (`SamplingParams.stop`).
        pause_mode: treatment of running requests when weights arrive; see the module.
        mode: ``double_buffer``: new weights are written to a second buffer. ``in_place``: they overwrite the weights in
            use.
        version: the version of the model's current weights; None: serve nothing before the first push.
        max_batch: the most responses that are sampled together; further requests wait for a free slot.
        keep_cache: with ``pause_mode="keep"``, responses continue with the keys and values that earlier weights
            computed, instead of computing them anew (in-flight weight updates; Piché et al. 2025, arXiv:2509.19128).
            The log-probabilities of a sample are always those that its tokens were drawn with.
        lora: the options of the trainer's adapter. The engine adds such an adapter to the model, and receives the
            adapter's tensors only. The adapter is not merged into the weights, so pushes cause no rounding of these.
        cuda_graphs: on a GPU, record passes as CUDA graphs and replay them, so that the GPU does not wait for Python.
            The engine then keeps its cache while it is idle. If passes cannot be recorded, a warning says so, and they
            run without graphs. Hooks of modules do not run in graphs.
        who: name in errors, until a receiver sets its own.
    """

    pause_modes: frozenset[PauseMode] = frozenset({"abort", "wait", "keep"})

    def __init__(
        self, model: nn.Module, *, pad_token_id: int = 0, stop_token_ids: Sequence[int] | None = None,
        tokenizer: Any = None, pause_mode: PauseMode = "wait", mode: str = "double_buffer", version: int | None = None,
        max_batch: int = 64, keep_cache: bool = False, lora: LoraOptions | None = None, cuda_graphs: bool = True,
        who: str = "the engine", clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if mode not in ("double_buffer", "in_place"):
            raise UsageError(f"mode={mode!r}: it is 'double_buffer' or 'in_place'")
        given: Any = max_batch
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise UsageError(f"max_batch={max_batch!r}: it is a whole number ≥ 1")
        stops = end_tokens(model) if stop_token_ids is None else list(stop_token_ids)
        self.model = model if lora is None else add_adapter(model, lora).eval()
        self.pause_mode, self.keep_cache = pause_mode, keep_cache
        self.gate = VersionGate(who)
        self.gate.set_version(version)
        self._sink = SleepingSink(self.model, mode, self.gate, lora=lora is not None)
        self._pad, self._clock = pad_token_id, clock
        self._decode = None if tokenizer is None else decoder(tokenizer)
        self._vocabulary = vocabulary_of(model)
        self._paused: PauseMode | None = None
        self._asleep: SleepLevel | None = None
        self._closed = False
        self._tokens, self._busy_s = 0, 0.0
        self._given_up = GivenUp()
        self._soonest = math.inf
        """The earliest time at which a time limit ends a response."""
        graphs = graphs_for(self.model) if cuda_graphs else None
        if graphs is not None:
            use_grouped_attention(self.model)
        self._batch = ContinuousBatch(
            self.model, stop_token_ids=stops, pad=pad_token_id, most_rows=max_batch, graphs=graphs
        )
        self._state = threading.Condition()
        """Guards the fields below; notified when a request ends or may be admitted."""
        self._queue: deque[PendingSample] = deque()
        self._running: dict[Growing, PendingSample] = {}
        self._draining = False
        """True: no request is admitted, and a pause waits for the end of the running ones."""
        self._ending = False
        """True: all requests end at once with their present tokens."""
        self._thread: threading.Thread | None = None
        self._seen = 0
        """The value of the sink's ``changes`` for which the running batch was last prepared."""

    @property
    def sink(self) -> WeightSink:
        return self._sink

    @property
    def version(self) -> int | None:
        return self.gate.version

    # Requests.

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, timeout_s: float = 600.0,
        on_tokens: OnTokens | None = None,
    ) -> Future[Sample]:  # fmt: skip
        checked = checked_rows([prompt], self._vocabulary, what="prompt")
        return self._let_in(checked, [params], timeout_s, on_tokens=on_tokens)[0]

    def submit_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, timeout_s: float = 600.0
    ) -> list[Future[Sample]]:
        """Start several requests, each with its own parameters, so that all begin in the same step."""
        return self._let_in(checked_rows(prompts, self._vocabulary, what="prompt"), params, timeout_s)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, timeout_s: float = 600.0
    ) -> list[Sample]:
        prompts = checked_rows(prompts, self._vocabulary, what="prompt")
        checked_params(params, can_decode=self._decode is not None)
        deadline = self._clock() + timeout_s
        futures = self._let_in(prompts, [params] * len(prompts), timeout_s, by_row=True)
        try:
            return [future.result(max(deadline - self._clock(), 0.0)) for future in futures]
        except TimeoutError:
            raise TimeoutError(
                f"{self.gate.who}: {len(prompts)} samples were not made within {timeout_s:g} s"
            ) from None
        finally:
            for future in futures:
                future.cancel()

    def _let_in(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], timeout_s: float, *, by_row: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> list[Future[Sample]]:  # fmt: skip
        """Queue requests. ``by_row``: they share one seed, from which each request derives its own by its row."""
        for each in {id(one): one for one in params}.values():
            checked_params(each, can_decode=self._decode is not None)
        if not prompts:
            return []
        requests = [
            PendingSample(
                Growing(prompt, each, row if by_row else 0, self._decode, on_tokens), SampleFuture(self._given_up)
            )
            for row, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        deadline = self._clock() + timeout_s
        with self._state:
            if not self._state.wait_for(lambda: not self._draining, timeout_s):
                raise TimeoutError(f"{self.gate.who}: {len(prompts)} samples were not begun within {timeout_s:g} s")
        # Requests are added while the gate is held, so that a running flip completes first.
        with self._serving(max(deadline - self._clock(), 0.0)), self._state:
            self._queue.extend(requests)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"rlmesh-{self.gate.who}", daemon=True)
                self._thread.start()
        return [request.future for request in requests]

    # On the thread that samples.

    def _run(self) -> None:
        device = next(self.model.parameters()).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            more = self._has_work()
            while more:
                try:
                    more = self._steps()
                except Exception as error:
                    self._fail_all(error)
                    self._batch.drop()
                    more = self._has_work()

    def _steps(self) -> bool:
        """Sample until no request is left (returns False). Returns True if the gate is not free or ``pause_mode`` has
        changed: call it again."""
        # With "wait" the gate is held until all admitted requests have ended; while a flip waits, no more are admitted.
        waits = self.pause_mode == "wait"
        with self._held() if waits else nullcontext(0) as version:
            while True:
                if version is not None:
                    self._step()
                if not self._has_work():
                    return False
                if version is None or (self.pause_mode == "wait") != waits:
                    return True

    def _has_work(self) -> bool:
        """Drop requests that were given up, and end those that must end. False if none is left, so that the thread
        ends."""
        with self._state:
            if self._given_up.some:
                self._given_up.some = False
                for request in [request for request in self._running.values() if request.future.cancelled()]:
                    self._take_out(request)
                self._queue = deque(request for request in self._queue if not request.future.cancelled())
            if self._clock() >= self._soonest:
                self._end_late()
            if self._ending:
                self._end_all()
            elif self._closed:
                self._fail_all(UsageError(f"{self.gate.who} was closed"))
            if self._running or self._queue:
                return True
            self._batch.free()
            self._thread = None
            self._state.notify_all()
            return False

    def _end_late(self) -> None:
        """End the responses that have reached their time limits."""
        now = self._clock()
        for request in [request for growing, request in self._running.items() if growing.ends_at <= now]:
            self._take_out(request)
            request.growing.finish("time")
            request.finish()
        self._soonest = min((growing.ends_at for growing in self._running), default=math.inf)

    def _take_out(self, request: PendingSample) -> None:
        del self._running[request.growing]
        self._batch.remove(lambda growing: growing is request.growing)
        self._state.notify_all()

    def _take_out_all(self) -> list[PendingSample]:
        out = [*self._running.values(), *self._queue]
        self._batch.remove(lambda growing: True)
        self._running.clear()
        self._queue.clear()
        self._state.notify_all()
        return out

    def _end_all(self) -> None:
        for request in self._take_out_all():
            request.growing.finish("abort")
            request.finish()

    def _fail_all(self, error: Exception) -> None:
        with self._state:
            for request in self._take_out_all():
                request.fail(error)

    @contextmanager
    def _held(self) -> Iterator[int | None]:
        """A block that holds the gate; gives the version, or None if a flip is still under way after `GATE_S`."""
        began = self._clock()
        version = None
        with ExitStack() as stack:
            try:
                version = stack.enter_context(self._serving(GATE_S))
            except WeightsNotReady:
                if self._clock() - began < GATE_S:
                    raise  # there are no weights, so there is no flip to wait for
            yield version

    def _step(self) -> None:
        """Sample one token of each response."""
        began = self._clock()
        with self._held() as version:
            if version is None:
                return
            ended = self._advance(version)
        self._busy_s += self._clock() - began
        with self._state:
            out = [self._running.pop(growing) for growing in ended]
            self._state.notify_all()
        for request in out:
            request.finish()

    def _advance(self, version: int) -> list[Growing]:
        with self._state:
            if self._sink.changes != self._seen:
                self._seen = self._sink.changes
                if self.pause_mode == "abort":
                    self._end_begun()
                if not (self.keep_cache and self.pause_mode == "keep"):
                    self._batch.restart()
            while self._queue and self._batch.room:
                request = self._queue.popleft()
                if request.growing.params.time_limit_s is not None:
                    request.growing.begin_time(self._clock())
                    self._soonest = min(self._soonest, request.growing.ends_at)
                self._running[request.growing] = request
                self._batch.add(request.growing)
        before = sum(len(growing.tokens) for growing in self._running)
        ended = self._batch.step(version)
        self._tokens += sum(len(growing.tokens) for growing in self._running) - before
        return ended

    def _end_begun(self) -> None:
        """End the responses that have tokens of earlier weights."""
        for growing in self._batch.remove(lambda growing: bool(growing.tokens)):
            request = self._running.pop(growing)
            growing.finish("abort")
            request.finish()
        self._state.notify_all()

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[Sequence[int]], *, timeout_s: float = 60.0) -> list[list[float]]:
        sequences = checked_rows(sequences, self._vocabulary, what="sequence")
        width = max(map(len, sequences), default=0)
        if width < 2:
            return [[] for _ in sequences]
        with self._serving(timeout_s):
            device = next(self.model.parameters()).device
            tokens = torch.tensor([[*row, *[self._pad] * (width - len(row))] for row in sequences], device=device)
            # No mask is needed: padding is on the right, and a causal model does not attend to the right.
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            found = logits.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1).tolist()
        return [row[: len(given) - 1] for row, given in zip(found, sequences, strict=True)]

    def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        if mode not in self.pause_modes:
            raise UsageError(f"pause({mode!r}): this engine can {', '.join(sorted(self.pause_modes))}")
        deadline = self._clock() + timeout_s
        with self._state:
            # With "keep", requests stop between two tokens; otherwise all admitted requests end first.
            self._draining, self._ending = mode != "keep", mode == "abort"
            ended = mode == "keep" or self._state.wait_for(lambda: not (self._running or self._queue), timeout_s)
            left = len(self._running) + len(self._queue)
            self._ending = False
        try:
            if not ended:
                raise WeightSyncError(
                    f"{self.gate.who} is not paused: it still makes {left} samples after {timeout_s:g} s"
                )
            self.gate.close(f"the engine is paused ({mode})", max(deadline - self._clock(), 0.001))
        finally:
            with self._state:
                self._draining = False
                self._state.notify_all()
        self._paused = mode

    def resume(self) -> None:
        self._paused = None
        self.gate.open()

    def sleep(self, level: SleepLevel = 1) -> None:
        if self._paused is not None:
            self.resume()
        self.pause("wait")
        self._asleep = level
        if level == 2:
            self.gate.set_version(None, "the engine gave its weights up to sleep")
        with self._state:
            # The sampling thread, and the memory of its last pass, exist a moment longer than its last request.
            self._state.wait_for(lambda: self._thread is None or bool(self._queue), CLOSE_S)
            self._batch.drop()
        self._sink.release(level)
        self.resume()

    def wake(self) -> None:
        if self._asleep is not None:
            self._sink.regain()
        self._asleep = None

    def reset_prefix_cache(self) -> None:
        """Drops nothing: the engine caches running responses only."""

    def metrics(self) -> Mapping[str, float]:
        return {"generated_tokens": float(self._tokens), "generating_s": self._busy_s}

    def close(self) -> None:
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)

    def _serving(self, timeout_s: float) -> AbstractContextManager[int]:
        if self._closed:
            raise UsageError(f"{self.gate.who} is closed")
        if self._asleep is not None:
            raise WeightsNotReady(f"{self.gate.who} sleeps (level {self._asleep}): call wake() first")
        return self.gate.serving(timeout_s)
