"""`TransformersEngine`: a rollout engine that needs only torch and transformers, and no GPU.

It samples token by token, with a key-value cache, and holds the gate for one token at a time: a flip happens between
two tokens. The ``pause_mode`` decides about the running batch: it ends (``abort``), it continues with the new weights
and a recomputed cache (``keep``), or the flip waits for its end (``wait``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlmesh import ModuleSink, VersionGate, WeightSink
from rlmesh.errors import UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.prompts import checked_params, checked_rows
from rlmesh.rl.engines.rollout import PauseMode, Sample, SamplingParams, SleepLevel
from rlmesh.rl.engines.sampling import draw

__all__ = ["TransformersEngine", "sample_batch"]

Hold = Callable[[], AbstractContextManager[int]]
"""A context manager that gives the version of the weights, and keeps them unchanged until it exits."""


class TransformersEngine:
    """See the module, and `RolloutEngine`.

    Batches of several threads run one after the other.

    Args:
        model: a causal language model of transformers, in eval mode, on a CPU or a GPU.
        pad_token_id: padding of shorter prompts; masked, so any existing token will do.
        stop_token_ids: tokens that end a response. None: those of the model's configuration.
        pause_mode: treatment of the running batch when weights come.
        mode: of the sink: `double_buffer` keeps a second set of weights, `in_place` overwrites.
        version: the version of the model's current weights; None: serve nothing before the first push.
        who: name in errors, until a receiver sets its own.
    """

    pause_modes: frozenset[PauseMode] = frozenset({"abort", "wait", "keep"})

    def __init__(
        self, model: nn.Module, *, pad_token_id: int = 0, stop_token_ids: Sequence[int] | None = None,
        pause_mode: PauseMode = "wait", mode: str = "double_buffer", version: int | None = None,
        who: str = "the engine", clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if mode not in ("double_buffer", "in_place"):
            raise UsageError(f"mode={mode!r}: it is 'double_buffer' or 'in_place'")
        self.model, self.pause_mode = model, pause_mode
        self.gate = VersionGate(who)
        self.gate.set_version(version)
        self._sink = _Sink(model, mode, self.gate)
        self._pad, self._clock = pad_token_id, clock
        self._stops = tuple(_end_tokens(model) if stop_token_ids is None else stop_token_ids)
        self._vocabulary = _vocabulary_of(model)
        self._turn = threading.RLock()
        self._paused: PauseMode | None = None
        self._ending = threading.Event()
        self._asleep: SleepLevel | None = None
        self._closed = False
        self._tokens, self._busy_s = 0, 0.0

    @property
    def sink(self) -> WeightSink:
        return self._sink

    @property
    def version(self) -> int | None:
        return self.gate.version

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, timeout_s: float = 600.0
    ) -> list[Sample]:
        prompts, params = checked_rows(prompts, self._vocabulary, what="prompt"), checked_params(params)
        deadline = self._clock() + timeout_s

        def hold() -> AbstractContextManager[int]:
            left = deadline - self._clock()
            if left <= 0:
                raise TimeoutError(f"{self.gate.who}: {len(prompts)} samples were not made within {timeout_s:g} s")
            return self._serving(left)

        with self._take_turn(deadline, f"{len(prompts)} samples"):
            began = self._clock()
            with hold() if self.pause_mode == "wait" else nullcontext():
                samples = sample_batch(
                    self.model, prompts, params, hold=hold, pad_token_id=self._pad,
                    stop_token_ids=(*self._stops, *params.stop_token_ids), keep=self.pause_mode == "keep",
                    ending=self._ending.is_set,
                )  # fmt: skip
            self._tokens += sum(len(sample.token_ids) for sample in samples)
            self._busy_s += self._clock() - began
        return samples

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[Sequence[int]], *, timeout_s: float = 60.0) -> list[list[float]]:
        sequences = checked_rows(sequences, self._vocabulary, what="sequence")
        width = max(map(len, sequences), default=0)
        if width < 2:
            return [[] for _ in sequences]
        with self._serving(timeout_s):
            device = next(self.model.parameters()).device
            tokens = torch.tensor([[*row, *[self._pad] * (width - len(row))] for row in sequences], device=device)
            # Padding is on the right, to which a causal model does not attend.
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits.float().log_softmax(-1)
            found = logits.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1).tolist()
        return [row[: len(given) - 1] for row, given in zip(found, sequences, strict=True)]

    def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        if mode not in self.pause_modes:
            raise UsageError(f"pause({mode!r}): this engine can {', '.join(sorted(self.pause_modes))}")
        if mode == "abort":
            self._ending.set()
        try:
            if mode in ("abort", "wait"):  # the running batch ends; later batches wait at the gate
                with self._take_turn(self._clock() + timeout_s, "the batch that runs"):
                    self.gate.close(f"the engine is paused ({mode})", timeout_s)
            else:
                self.gate.close("the engine is paused (keep)", timeout_s)
        except TimeoutError as error:
            raise WeightSyncError(f"{self.gate.who} is not paused: {error}") from error
        finally:
            self._ending.clear()
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
        self._sink.release(level)
        self.resume()

    def wake(self) -> None:
        if self._asleep is not None:
            self._sink.regain()
        self._asleep = None

    def reset_prefix_cache(self) -> None:
        """Does nothing: a cache lives as long as its batch."""

    def metrics(self) -> Mapping[str, float]:
        return {"generated_tokens": float(self._tokens), "generating_s": self._busy_s}

    def close(self) -> None:
        self._closed = True

    def _serving(self, timeout_s: float) -> AbstractContextManager[int]:
        if self._closed:
            raise UsageError(f"{self.gate.who} is closed")
        if self._asleep is not None:
            raise WeightsNotReady(f"{self.gate.who} sleeps (level {self._asleep}): call wake() first")
        return self.gate.serving(timeout_s)

    @contextmanager
    def _take_turn(self, deadline: float, what: str) -> Iterator[None]:
        if not self._turn.acquire(timeout=max(deadline - self._clock(), 0.0)):
            raise TimeoutError(f"{self.gate.who}: {what} did not end in time")
        try:
            yield
        finally:
            self._turn.release()


class _Sink(ModuleSink):
    """A module's sink that shares the engine's gate, and frees the memory while the engine sleeps."""

    def __init__(self, model: nn.Module, mode: Any, gate: VersionGate) -> None:
        super().__init__(model, mode)
        self.gate = gate
        self._model = model
        self._home = next(model.parameters()).device
        self._gone: dict[int, int] = {}
        self._missing: set[str | None] = set()

    def release(self, level: SleepLevel) -> None:
        self.let_go()
        if level == 1 and self._home.type != "cpu":
            self._move("cpu")
        elif level == 2:
            self._gone = {}
            for tensors in self._targets.values():
                bare = torch.empty_like(tensors[0])  # new memory: the memory in use may be the source's
                self._gone[id(tensors[0])] = bare.untyped_storage().nbytes()
                bare.untyped_storage().resize_(0)
                for tensor in tensors:
                    tensor.data = bare
        if self._home.type == "cuda":
            torch.cuda.empty_cache()  # other processes may need the memory

    def regain(self) -> None:
        if self._gone:
            for tensors in self._targets.values():
                tensors[0].data.untyped_storage().resize_(self._gone[id(tensors[0])])
            self._gone = {}
        elif self._home.type != "cpu":
            self._move(str(self._home))

    def _move(self, device: str) -> None:
        for tensors in self._targets.values():
            moved = tensors[0].data.to(device)
            for tensor in tensors:
                tensor.data = moved

    def begin(self, version: int) -> None:
        if self._gone:
            raise WeightSyncError("the engine sleeps and has no memory for weights: call wake() before the push")
        self._missing = set(self._targets)
        super().begin(version)

    def stage(self, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        super().stage(tensors, keep=keep)
        self._missing -= self._manifest.by_owner(tensors).keys()

    def rooms(self, entries: Sequence[Any], *, keep: bool) -> Sequence[Tensor | None]:
        found = super().rooms(entries, keep=keep)
        # Entries with memory are written there, and do not come by stage().
        self._missing -= {self._owner(entry) for entry, room in zip(entries, found, strict=True) if room is not None}
        return found

    def flip(self, version: int) -> None:
        if self._missing:
            raise WeightSyncError(
                f"no weights came for {len(self._missing)} tensors, such as {min(map(str, self._missing))}"
            )
        super().flip(version)


def _vocabulary_of(model: Any) -> int | None:
    """The number of tokens for which the model has embeddings; None: unknown."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


def _end_tokens(model: nn.Module) -> list[int]:
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return list(ends) if isinstance(ends, list | tuple) else [int(ends)]
    return []


@torch.no_grad()
def sample_batch(
    model: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, *, stop_token_ids: Sequence[int],
    pad_token_id: int = 0, hold: Hold = lambda: nullcontext(0), keep: bool = True,
    ending: Callable[[], bool] = lambda: False,
) -> list[Sample]:  # fmt: skip
    """Continue each prompt, all of them in one batch with a key-value cache.

    Args:
        model: a causal language model of transformers.
        hold: entered for each token.
        keep: continue when the version changes between two tokens, with a new cache; else end there.
        ending: called before each token; if true, sampling ends with the tokens so far.
    """
    prompts = checked_rows(prompts, _vocabulary_of(model), what="prompt")
    if not prompts:
        return []
    generator = torch.Generator(device=next(model.parameters()).device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    rows = [Growing(prompt, params, row) for row, prompt in enumerate(prompts)]
    state: _Cache | None = None
    for _ in range(params.max_tokens):
        with hold() as version:
            if state is not None and state.version != version:
                if not keep:
                    break
                state = None
            if ending():
                break
            if state is None:
                state = _Cache(version, rows, pad_token_id, generator.device)
            tokens, log_probs = draw(state.advance(model), params, generator)
        state.tokens = tokens.unsqueeze(1)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
            if row.finish_reason is not None:
                continue
            row.add([token], [log_prob], version)
            if token in stop_token_ids or not row.left:
                row.finish("stop" if token in stop_token_ids else "length")
        if all(row.finish_reason for row in rows):
            break
    return [row.sample() for row in rows]


class _Cache:
    """Keys and values of all rows, computed by one version; ``tokens`` are those not processed yet, ``[batch, new]``,
    padded on the left."""

    def __init__(self, version: int, rows: Sequence[Growing], pad: int, device: torch.device) -> None:
        known = [row.context for row in rows]
        width = max(map(len, known))
        self.version = version
        self.tokens = torch.tensor([[pad] * (width - len(row)) + row for row in known], device=device)
        lengths = torch.tensor([len(row) for row in known], device=device)
        self._attend = (torch.arange(width, device=device) >= width - lengths.unsqueeze(1)).long()
        self._past: dict[str, Any] = {}

    def advance(self, model: Any) -> Tensor:
        """Logits ``[batch, vocabulary]`` of the next token."""
        if self._past:
            self._attend = torch.cat([self._attend, self._attend.new_ones(len(self._attend), 1)], 1)
        positions = (self._attend.cumsum(-1) - 1).clamp(min=0)[:, -self.tokens.shape[1] :]
        out = model(
            input_ids=self.tokens, attention_mask=self._attend, position_ids=positions, use_cache=True,
            logits_to_keep=1, **self._past,
        )  # fmt: skip
        # Newer versions of transformers call it cache.
        name = "cache" if "cache" in out else "past_key_values"
        self._past = {name: out[name]}
        logits: Tensor = out.logits[:, -1]
        return logits
