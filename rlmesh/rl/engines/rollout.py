"""`RolloutEngine`: the interface of engines that sample, with its input and output types.

::

    engine = TransformersEngine(model, pad_token_id=0)
    self.receive_weights(engine.sink)           # in setup() of a role that inherits ReceivesWeights
    …
    samples = engine.generate(prompts, SamplingParams(max_tokens=64))

An engine never samples with weights that are missing, half written or of an unknown version: `generate` then raises
`WeightsNotReady`. Every sample tells the version of each of its tokens.

docs/writing-an-engine.md explains how to write an engine. The module has no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from operator import index
from typing import Any, Literal, Protocol

from rlmesh import VersionGate, VersionSpans, WeightSink

__all__ = ["FinishReason", "OnTokens", "PauseMode", "RolloutEngine", "Sample", "SamplingParams", "SleepLevel"]

PauseMode = Literal["abort", "wait", "keep"]
"""The treatment of running requests in a pause. ``abort``: they end at once. ``wait``: the pause begins when they have
ended. ``keep``: they stop, and continue after the pause with the weights that the engine then has."""

FinishReason = Literal["stop", "length", "time", "abort"]
"""The reason for the end of a response. ``stop``: an end token, which is its last token. ``length``: ``max_tokens``.
``time``: ``time_limit_s``. ``abort``: a pause."""

SleepLevel = Literal[1, 2]
"""The depth of sleep. 1: weights are moved to the host, and caches are dropped. 2: weights are dropped too, and must be
pushed again."""

OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""A function that is called with the next tokens of a response and their log-probabilities, on a thread of the engine.
It must not block or raise."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling. For several samples of one prompt, pass the prompt several times.

    Attributes:
        max_tokens: token limit of a response, ≥ 1.
        temperature: ≥ 0; 0 takes the likeliest token.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability, in (0, 1].
        stop_token_ids: tokens that end a response, besides the model's own end token.
        seed: makes a call reproducible: the same weights, prompts and parameters give the same samples, unless a pause
            (or, with vLLM, another request) interferes. None: different samples each time.
        min_p: only tokens with at least this share of the likeliest token's probability, in [0, 1) (Nguyen et al. 2024,
            arXiv:2407.01082); it applies before top_k and top_p.
        repetition_penalty: > 0; logits of tokens in prompt or response are divided by it if positive, else multiplied
            (Keskar et al. 2019, arXiv:1909.05858). 1: none.
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logits of the response's tokens: once per
            token, and once per occurrence. Penalties come before the temperature. A policy that is sampled with them is
            another policy than the trainer's: correct its samples (:mod:`rlmesh.rl.correction`).
        stop: texts that end a response, with the token that completes one. The engine needs a tokenizer for them.
        time_limit_s: seconds, from its first token on, after which a response ends with the tokens that it has; None:
            no limit. Pauses count.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        if not self._is_right():
            raise ValueError(
                "max_tokens must be a whole number ≥ 1, temperature a number ≥ 0, top_k a whole number ≥ 0 (0: all), "
                "top_p in (0, 1], min_p in [0, 1), repetition_penalty > 0, presence_penalty and frequency_penalty in "
                "[-2, 2], stop_token_ids whole numbers, stop a tuple of texts that are not empty, time_limit_s > 0 or "
                f"None, and seed a whole number or None: {self}"
            )

    def _is_right(self) -> bool:
        try:
            list(map(index, (self.max_tokens, self.top_k, *self.stop_token_ids, self.seed or 0)))
            sizes = self.max_tokens >= 1 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p < 1
            penalties = abs(self.presence_penalty) <= 2 and abs(self.frequency_penalty) <= 2
            penalties = penalties and 0 < self.repetition_penalty < inf
            stop: Any = self.stop
            texts = isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop)
            limit = self.time_limit_s is None or self.time_limit_s > 0
            return sizes and penalties and texts and limit and 0 <= self.temperature < inf
        except TypeError:
            return False

    def seeded(self, seed: int) -> SamplingParams:
        """These parameters with another seed. They are not checked again, which takes most of the time of
        `dataclasses.replace`."""
        made = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "seed", index(seed))
        return made

    @property
    def truncates(self) -> bool:
        """True if top_k, top_p or min_p leave tokens out of the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        """True if there are penalties for the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One response.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the sampled tokens, with the end token if there is one; nothing else is appended.
        log_probs: one per token, in nats, under the sampling distribution: penalties, temperature, min_p, top_k and
            top_p applied; at temperature 0, of the softmax of the penalised logits.
        finish_reason: the reason for the end.
        version_spans: (version, first token, token after the last), in order and without gaps, over ``token_ids``.
        kept_log_mass: one per token, in nats: the log of the probability of all tokens that min_p, top_k and top_p
            keep. Added to ``log_probs``, it gives log-probabilities of the whole vocabulary, which a trainer compares
            with its own (:func:`rlmesh.rl.correction.whole_vocabulary`). None: nothing was left out.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version_spans: list[tuple[int, int, int]]
    kept_log_mass: list[float] | None = None

    @classmethod
    def of(
        cls, prompt_token_ids: Sequence[int], token_ids: Sequence[int], log_probs: Sequence[float], version: int,
        finish_reason: FinishReason = "stop",
    ) -> Sample:  # fmt: skip
        """Make a sample whose tokens all have one version."""
        spans = VersionSpans()
        spans.add(version, len(token_ids))
        return cls(list(prompt_token_ids), list(token_ids), list(log_probs), finish_reason, spans.spans)

    @property
    def policy_version(self) -> int | None:
        """The oldest version of any token, from which staleness is counted; None without tokens."""
        return VersionSpans(self.version_spans).policy_version

    def __post_init__(self) -> None:
        count, spans = len(self.token_ids), self.version_spans
        if len(self.log_probs) != count or (spans[-1][2] if spans else 0) != count:
            raise ValueError(
                f"{len(self.token_ids)} tokens need as many log-probs and versions; there are {len(self.log_probs)} "
                f"log-probs, and the versions are {self.version_spans}"
            )
        if self.kept_log_mass is not None and len(self.kept_log_mass) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens need as many masses; there are {len(self.kept_log_mass)}")

    def __reduce__(self) -> tuple[type[Sample], tuple[Any, ...]]:
        # A step has thousands of samples, and the generic way of dataclasses takes twice as long.
        return Sample, (
            self.prompt_token_ids, self.token_ids, self.log_probs, self.finish_reason, self.version_spans,
            self.kept_log_mass,
        )  # fmt: skip


class RolloutEngine(Protocol):
    """An engine that samples.

    All methods may be called from any thread, `generate` from several at once. A weight sync calls `sink` on another
    thread.

    Attributes:
        pause_modes: the supported pause modes.
        gate: keeps the version, and admits requests. ``sink`` has the same gate as an attribute.
    """

    pause_modes: frozenset[PauseMode]
    gate: VersionGate

    @property
    def sink(self) -> WeightSink:
        """The sink of a `WeightSync`, for `ReceivesWeights.receive_weights`."""
        ...

    @property
    def version(self) -> int | None:
        """The version of the weights that the engine serves; None: it serves none."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, timeout_s: float = 600.0
    ) -> list[Sample]:
        """One sample per prompt, in order. While the engine is paused, new requests wait.

        Raises:
            UsageError: a prompt is empty or has ids without an embedding in the model (the message names the row), or
                stop texts are given and the engine has no tokenizer. Nothing was sampled.
            WeightsNotReady: the engine has no weights of a known version, sleeps, or lost its weights by a push that
                failed during the call.
            TimeoutError: the call took longer than ``timeout_s``; the samples are given up.
        """
        ...

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, timeout_s: float = 600.0,
        on_tokens: OnTokens | None = None,
    ) -> Future[Sample]:  # fmt: skip
        """Start one request; its future has the sample, or the error of `generate`. Requests of any number of calls are
        sampled together. ``cancel()`` gives a request up.

        Args:
            timeout_s: limit for the wait until the request is admitted, while the engine is paused or receives weights.
                To limit the wait for the sample, use ``result(timeout)``.
            on_tokens: gets the tokens as they are sampled, before the future has the sample. `AsyncVllmEngine` passes
                all tokens of a stretch at once, at its end.

        Raises:
            UsageError, WeightsNotReady: as for `generate`, at once.
        """
        ...

    def log_probs(self, sequences: Sequence[Sequence[int]], *, timeout_s: float = 60.0) -> list[list[float]]:
        """Log-probabilities, in nats at temperature 1, of each token but the first, given the tokens before it: n - 1
        numbers for a sequence of n tokens. No cache is used: this probes the current weights.

        Raises:
            UsageError: as for `generate`.
            WeightsNotReady: as for `generate`.
        """
        ...

    def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        """Stop sampling; returns when no request runs. New requests wait until `resume`.

        Raises:
            UsageError: the engine does not support ``mode``; see ``pause_modes``.
            WeightSyncError: requests still ran after ``timeout_s``; the engine is not paused.
        """
        ...

    def resume(self) -> None:
        """Admit requests again, and continue the kept ones."""
        ...

    def sleep(self, level: SleepLevel = 1) -> None:
        """Free memory. Running requests end first; `generate` raises `WeightsNotReady` until `wake`."""
        ...

    def wake(self) -> None:
        """Allocate the memory again. After level 2 there is no version until the next push."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop cached computations for earlier prompts. A push does this too."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics for a report; names end in their unit."""
        ...

    def close(self) -> None:
        """End the engine and all its threads and processes. Running requests fail."""
        ...
