"""Requests to vLLM: `RequestBatch`, vLLM's parameters, and the numbers in its outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.vllm.carried_mass import WHOLE

__all__ = [
    "RequestBatch", "can_resume", "log_probs_of", "masses_of", "probe_params", "prompt_log_probs", "stretch_params",
    "tokens_of",
]  # fmt: skip


class RequestBatch:
    """Requests that were made together; ``done`` is set when all have ended, or all have failed.

    `ended` and `fail` are called on the engine's thread only.
    """

    def __init__(self, rows: Sequence[Growing]) -> None:
        self.rows = list(rows)
        self.done = threading.Event()
        self.withdrawn = False
        """The caller no longer waits."""
        self.error: Exception | None = None
        self._left = len(self.rows)
        self._then: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def ended(self) -> None:
        """Note that one more request has ended."""
        self._left -= 1
        if not self._left:
            self._finish()

    def fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._finish()

    def then(self, action: Callable[[], None]) -> None:
        """Call a function when the batch is done, or now if it is."""
        with self._lock:
            if not self.done.is_set():
                self._then = action
                return
        action()

    def _finish(self) -> None:
        with self._lock:
            self.done.set()
            action, self._then = self._then, None
        if action is not None:
            action()


def tokens_of(token_ids: Sequence[int]) -> Any:
    """A prompt in the form that vLLM's renderer returns; otherwise vLLM would render it on another thread."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids))


def stretch_params(row: Growing, ends: Sequence[int]) -> Any:
    """vLLM's parameters for the next stretch of a response."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    params = row.params
    return VllmParams(
        max_tokens=row.left, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=row.seed,
        stop_token_ids=[*ends, *params.stop_token_ids], detokenize=False, ignore_eos=True, min_p=params.min_p,
        repetition_penalty=params.repetition_penalty, presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty, logprobs=1 if params.truncates else 0,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip


def can_resume(row: Growing) -> bool:
    """False if penalties need the tokens of earlier stretches: vLLM counts the tokens of one stretch only."""
    return not (row.params.presence_penalty or row.params.frequency_penalty)


def probe_params() -> Any:
    """vLLM's parameters for log-probs of a prompt."""
    from vllm import SamplingParams as VllmParams

    return VllmParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)


def prompt_log_probs(output: Any) -> list[float]:
    """The log-probs of a finished probe's prompt."""
    tokens = output.prompt_token_ids
    return [float(output.prompt_logprobs[i][tokens[i]].logprob) for i in range(1, len(tokens))]


def log_probs_of(completion: Any) -> list[float]:
    """The log-probs of the tokens that one step of vLLM adds to a response."""
    return [float(at[token].logprob) for at, token in zip(completion.logprobs or (), completion.token_ids, strict=True)]


def masses_of(row: Growing, completion: Any) -> list[float]:
    """The log of the mass that truncation kept, at each token of a step; see `carry_mass`."""
    if not row.params.truncates:
        return []
    steps = zip(completion.logprobs or (), completion.token_ids, strict=True)
    return [min(float(at[WHOLE].logprob - at[token].logprob), 0.0) for at, token in steps]
