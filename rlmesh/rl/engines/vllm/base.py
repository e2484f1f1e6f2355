"""The common part of both vLLM engines: admission of requests, the sink of a weight sync, and vLLM's settings.

Weights are overwritten (`in_place`), since vLLM packs them and captures graphs that refer to their memory. The steps of
a push: the gate closes; running requests are aborted, kept or awaited; buckets are loaded into the layers; caches of
old weights are dropped; a fixed prompt is probed; and when all sinks have come this far, requests continue.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from rlmesh import Manifest, VersionGate, WeightSink
from rlmesh.errors import UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.growing import Decode, Growing, decoder
from rlmesh.rl.engines.prompts import checked_params, checked_rows
from rlmesh.rl.engines.rollout import OnTokens, PauseMode, Sample, SamplingParams, SleepLevel
from rlmesh.rl.engines.vllm.buckets import BucketWriter
from rlmesh.rl.engines.vllm.requests import RequestBatch

__all__ = ["ProbeResult", "VllmBase", "end_tokens", "engine_args"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
START_S = 600.0
CALL_S = 600.0
"""Timeout of vLLM's answers; packing the weights of a large model takes long."""
CLOSE_S = 60.0

OURS = ("model", "worker_extension_cls", "skip_tokenizer_init", "logprobs_mode", "disable_log_stats")
"""Arguments of vLLM that users may not set."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json")
CPU_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Log-probs of a fixed prompt right after a push, for comparison with the trainer's."""

    version: int
    token_ids: list[int]
    log_probs: list[float]


class Sink:
    """See `WeightSink`. Tensors have the names of a transformers checkpoint."""

    mode = "in_place"
    framework = "torch"

    def __init__(self, core: VllmBase, device: str, *, same_process: bool, halt_s: float) -> None:
        self.gate, self.device = core.gate, device
        self._core, self._halt_s = core, halt_s
        self._writer = None if same_process else BucketWriter()
        self._halted = False

    def manifest(self) -> Manifest | None:
        """Return None, since vLLM's parameters differ from a checkpoint's; the workers report missing tensors."""
        return None

    def begin(self, version: int) -> None:
        self._core.halt(self._core.pause_mode, self._halt_s)
        self._halted = True
        self._core.workers("rlmesh_begin")

    def stage(self, tensors: Mapping[str, Any], *, keep: bool) -> None:
        adapter = next((name for name in tensors if ".lora_" in name), None)
        if adapter is not None:
            raise WeightSyncError(
                f"{adapter}: this engine has no adapters. Push merged weights: named_tensors(lora='merged')"
            )
        head = tensors.get("lm_head.weight")
        if self._core.tied and head is not None and not any(
            other is head for name, other in tensors.items() if name != "lm_head.weight"
        ):  # fmt: skip
            raise WeightSyncError(
                "lm_head.weight: tied to the embedding in the engine's configuration, but a tensor of its own at the "
                "source: they could differ. Tie them at the source, or start the engine with tie_word_embeddings false"
            )
        if self._writer is None:
            self._core.workers("rlmesh_load", list(tensors.items()), keep)
        else:
            self._core.workers("rlmesh_load_bucket", self._writer.write(tensors))

    def flip(self, version: int) -> None:
        core = self._core
        reports = core.workers("rlmesh_finish")
        missing = sorted({name for report in reports for name in report["missing"]})
        if missing:
            raise WeightSyncError(
                f"no weights came for {len(missing)} of vLLM's parameters, the first of which is {missing[0]}"
            )
        core.drop_caches()
        core.label(version)
        found = core.probed([core.probe_token_ids], self._halt_s)[0]
        if not all(map(math.isfinite, found)):
            raise WeightSyncError(f"with version {version} the log-probs of a fixed prompt are not finite: {found}")
        core.probe = ProbeResult(version, core.probe_token_ids, found)

    def conclude(self, version: int) -> None:
        self._halted = False
        self._core.go_on(version)

    def rollback(self) -> None:
        raise WeightSyncError("this engine keeps one set of weights: there is nothing to go back to")

    def discard(self) -> None:
        if not self._halted:
            return
        self._halted = False
        try:
            self._core.workers("rlmesh_abandon")
        finally:
            self._core.lose(
                WeightsNotReady(
                    f"{self.gate.who} lost its weights to a push that failed while samples were being made. It serves "
                    "again after the next push"
                )
            )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class VllmBase(ABC):
    """See `VllmEngine`; subclasses define how vLLM is called. See `RolloutEngine` for the public methods."""

    pause_modes: frozenset[PauseMode] = frozenset({"abort", "wait", "keep"})
    probe: ProbeResult | None = None
    """The probe of the last push."""

    def __init__(
        self, model: str, *, pause_mode: PauseMode, version: int | None, who: str,
        probe_token_ids: Sequence[int] | None, pause_timeout_s: float,
    ) -> None:  # fmt: skip
        if pause_mode not in self.pause_modes:
            raise UsageError(f"pause_mode={pause_mode!r}: this engine can {', '.join(sorted(self.pause_modes))}")
        self.model_path, self.pause_mode = model, pause_mode
        self.gate = VersionGate(who)
        self.gate.set_version(version)
        self._ends, self._vocabulary, self.tied = end_tokens(model)
        self.probe_token_ids = list(probe_token_ids or (i % self._vocabulary for i in range(2, 10)))
        self._pause_s = pause_timeout_s
        self._sink: Sink
        self._thread: threading.Thread
        self._children: list[BaseProcess] = []
        """The processes that vLLM has started for this engine."""
        self._paused: PauseMode | None = None
        self._asleep: SleepLevel | None = None
        self._tokens = 0
        self._decoder: Decode | None = None
        self._carries_mass = False
        self._closed = False
        self._asking = threading.Lock()
        """Held while work is queued, so that none is queued after the engine's end."""

    @property
    def sink(self) -> WeightSink:
        return self._sink  # type: ignore[return-value]

    @property
    def version(self) -> int | None:
        return self.gate.version

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, timeout_s: float = 600.0
    ) -> list[Sample]:
        prompts, params = checked_rows(prompts, self._vocabulary, what="prompt"), checked_params(params)
        if not prompts:
            return []
        deadline = time.monotonic() + timeout_s
        batch = self._begin(prompts, params, timeout_s)
        if not batch.done.wait(max(deadline - time.monotonic(), 0.0)):
            self._withdraw(batch)
            raise TimeoutError(f"{self.gate.who}: {len(prompts)} samples were not made within {timeout_s:g} s")
        if batch.error is not None:
            raise batch.error
        samples = [row.sample() for row in batch.rows]
        self._tokens += sum(len(sample.token_ids) for sample in samples)
        return samples

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, timeout_s: float = 600.0,
        on_tokens: OnTokens | None = None,
    ) -> Future[Sample]:  # fmt: skip
        prompts, params = checked_rows([prompt], self._vocabulary, what="prompt"), checked_params(params)
        batch = self._begin(prompts, params, timeout_s, on_tokens)
        future: Future[Sample] = Future()

        def finish() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if batch.error is not None:
                future.set_exception(batch.error)
                return
            self._tokens += len(batch.rows[0].tokens)
            future.set_result(batch.rows[0].sample())

        batch.then(finish)
        future.add_done_callback(lambda done: self._withdraw(batch) if done.cancelled() else None)
        return future

    def _begin(
        self, prompts: Sequence[list[int]], params: SamplingParams, timeout_s: float, on_tokens: OnTokens | None = None
    ) -> RequestBatch:
        """Give requests to vLLM."""
        if params.truncates and not self._carries_mass:
            raise UsageError(
                f"{self.gate.who}: this version of vLLM does not tell how much probability top_p, top_k and min_p "
                "leave out, without which no trainer can use the samples. Sample from the whole vocabulary"
            )
        decode = self._decode() if params.stop else None
        deadline = time.monotonic() + timeout_s
        batch = RequestBatch([Growing(prompt, params, row, decode, on_tokens) for row, prompt in enumerate(prompts)])
        # The gate is held until the engine has the requests; later pushes take them into account.
        with self._serving(timeout_s):
            try:
                self._submit(batch, max(deadline - time.monotonic(), 0.0))
            except BaseException:
                self._withdraw(batch)  # requests that were accepted before one was refused
                raise
        return batch

    def _decode(self) -> Decode:
        """The decoder of the model folder's tokenizer, for stop texts: vLLM itself has none.

        Raises:
            UsageError: the folder has no tokenizer.
        """
        if self._decoder is None:
            from transformers import AutoTokenizer

            folder = Path(self.model_path)
            try:
                # transformers makes an empty tokenizer where a folder has none.
                if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
                    raise OSError(f"it has none of {', '.join(TOKENIZER_FILES)}")
                self._decoder = decoder(AutoTokenizer.from_pretrained(self.model_path))
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"stop: the engine finds texts with the tokenizer in {self.model_path}, which cannot be loaded "
                    f"({error!s:.200}). Save one there, or give stop_token_ids"
                ) from error
        return self._decoder

    def log_probs(self, sequences: Sequence[Sequence[int]], *, timeout_s: float = 60.0) -> list[list[float]]:
        sequences = checked_rows(sequences, self._vocabulary, what="sequence")
        longer = [row for row in sequences if len(row) > 1]
        if not longer:
            return [[] for _ in sequences]
        with self._serving(timeout_s):
            found = iter(self.probed(longer, timeout_s))
            return [next(found) if len(row) > 1 else [] for row in sequences]

    def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        if mode not in self.pause_modes:
            raise UsageError(f"pause({mode!r}): this engine can {', '.join(sorted(self.pause_modes))}")
        if self._paused is not None:
            return
        self.gate.close(f"the engine is paused ({mode})", timeout_s)
        try:
            self.halt(mode, timeout_s)
        except BaseException:
            self.gate.open()
            raise
        self._paused = mode

    def resume(self) -> None:
        if self._paused is None:
            return
        self._paused = None
        self.go_on(self.gate.version)
        self.gate.open()

    def sleep(self, level: SleepLevel = 1) -> None:
        self.resume()
        self.pause("wait")
        self._asleep = level
        if level == 2:
            self.gate.set_version(None, "the engine gave its weights up to sleep")
        self._set_asleep(level)
        self.resume()

    def wake(self) -> None:
        if self._asleep is not None:
            self._set_asleep(None)
        self._asleep = None

    def reset_prefix_cache(self) -> None:
        self.drop_caches()

    def metrics(self) -> Mapping[str, float]:
        return {"generated_tokens": float(self._tokens)}

    def close(self) -> None:
        """See `RolloutEngine`. Parts of vLLM, such as its default process group, last as long as the process."""
        with self._asking:
            if self._closed:
                return
            self._closed = True
            self._end()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning(
                "%s: vLLM did not end within %g s; what it holds is free when this process ends", self.gate.who, CLOSE_S
            )
        self._sink.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.gate.who} is closed")

    def _serving(self, timeout_s: float) -> AbstractContextManager[int]:
        self._check_open()
        if self._asleep is not None:
            raise WeightsNotReady(f"{self.gate.who} sleeps (level {self._asleep}): call wake() first")
        return self.gate.serving(timeout_s)

    def _answer(self, what: str, answer: Future[T], timeout_s: float = CALL_S) -> T:
        """Wait for the result of work on the engine's thread.

        Raises:
            TimeoutError: it took longer than ``timeout_s``; the work is cancelled, if it has not begun.
            UsageError: the engine was closed in the meantime.
        """
        try:
            return answer.result(timeout_s)
        except CancelledError:
            raise UsageError(f"{self.gate.who} was closed") from None
        except TimeoutError:
            answer.cancel()
            if answer.done() and not answer.cancelled():
                return answer.result(0)  # the work has just ended, or raised this TimeoutError itself
            raise TimeoutError(
                f"{self.gate.who}: vLLM did not {what} within {timeout_s:g} s. It is stopped, hangs, or needs longer: "
                "see the stacks of its processes; close() ends it"
            ) from None

    def _busy(self, left: int, timeout_s: float) -> WeightSyncError:
        return WeightSyncError(
            f"{self.gate.who} still makes {left} samples after {timeout_s:g} s: let them be shorter, pause with 'keep' "
            "or 'abort', or raise pause_timeout_s"
        )

    # Calls of vLLM.

    @abstractmethod
    def _end(self) -> None:
        """Tell the engine's thread to end after the queued work. Does not wait."""

    @abstractmethod
    def _submit(self, batch: RequestBatch, timeout_s: float) -> None:
        """Add requests to vLLM."""

    @abstractmethod
    def _withdraw(self, batch: RequestBatch) -> None:
        """Abort requests whose caller has gone, without waiting. May be called after their end."""

    @abstractmethod
    def _set_asleep(self, level: SleepLevel | None) -> None:
        """Free memory; None: allocate it again."""

    @abstractmethod
    def halt(self, mode: PauseMode, timeout_s: float) -> None:
        """Stop all requests; returns when none runs.

        Raises:
            WeightSyncError: requests still ran after ``timeout_s``, and continue.
            TimeoutError: vLLM did not stop in time; the kept requests continue once it has stopped.
        """

    @abstractmethod
    def go_on(self, version: int | None) -> None:
        """Continue with ``version`` and the kept requests."""

    @abstractmethod
    def lose(self, error: Exception) -> None:
        """Fail the kept requests with ``error``, then continue without a version."""

    @abstractmethod
    def workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` on all workers."""

    @abstractmethod
    def probed(self, sequences: Sequence[Sequence[int]], timeout_s: float) -> list[list[float]]:
        """Log-probabilities as `log_probs` gives them, also during a pause."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Drop all caches that earlier weights computed."""

    @abstractmethod
    def label(self, version: int) -> None:
        """Set the version in vLLM itself."""


def end_tokens(model: str) -> tuple[list[int], int, bool]:
    """A model folder's end tokens, the size of its vocabulary, and whether head and embedding are tied."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the folder may have no generation config
        ends = None
    ends = config.eos_token_id if ends is None else ends
    found = list(ends) if isinstance(ends, list | tuple) else [] if ends is None else [ends]
    return found, int(config.vocab_size), bool(config.tie_word_embeddings)


def engine_args(model: str, given: Mapping[str, Any], *, in_process: bool) -> dict[str, Any]:
    """Arguments for vLLM; also sets its environment variables, which it reads when it is imported."""
    import torch

    taken = sorted(set(given) & set(OURS))
    if taken:
        raise UsageError(f"{', '.join(taken)}: set by the engine itself")
    on_cpu = not torch.cuda.is_available()
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",  # all processes of an engine are on this machine
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    }
    if on_cpu:
        # By default vLLM would compile for seconds at the first request, and bind cores for itself alone.
        environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    arguments: dict[str, Any] = {
        "model": model,
        "worker_extension_cls": "rlmesh.rl.engines.vllm.worker.WorkerExtension",
        "skip_tokenizer_init": True,
        # Log-probs of the sampling distribution, which training needs.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if on_cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        if not in_process and given.get("tensor_parallel_size", 1) == 1 and given.get("pipeline_parallel_size", 1) == 1:
            # Run a single worker in the scheduler's process. On CPUs vLLM would start a process for it, to set its
            # OpenMP threads; the two would then busy-poll each other's messages, and occupy two cores per engine.
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            arguments["distributed_executor_backend"] = UniProcExecutor
    return arguments | dict(given)
