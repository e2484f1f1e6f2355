"""Settings of a training: dataclasses for the sections, overrides as text, and checks that report all faults at
once."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlmesh.errors import UsageError
from rlmesh.rl.engines.lora import LoraOptions
from rlmesh.rl.evaluation.settings import COLDEST, HOTTEST
from rlmesh.rl.faults import (
    MOST_PROCESSES,
    MOST_THREADS,
    CheckedKeywords,
    keys_of,
    too_large,
    too_small,
    unknown_key,
    value_of,
)

if TYPE_CHECKING:
    from rlmesh.rl.engines.rollout import SamplingParams

__all__ = [
    "ActorSettings",
    "CriticSettings",
    "Engine",
    "LoraSettings",
    "Placement",
    "Precision",
    "ReferenceSettings",
    "RolloutSettings",
    "apply_overrides",
    "checked",
]

Engine = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
Placement = Literal["auto", "separate", "shared", "fused"]
Precision = Literal["float32", "bfloat16"]
T = TypeVar("T")
LIST = 'a list, such as [1, 2] or ["a", "b"]'


@dataclass(frozen=True)
class LoraSettings(CheckedKeywords):
    """An adapter that is trained instead of the policy's weights; see `rlmesh.rl.engines.lora.LoraOptions`.

    Attributes:
        rank: rank of the adapter; 0: no adapter, all weights are trained.
        alpha: the adapter is scaled by ``alpha / rank``; null: twice the rank.
        target_modules: names of the linear layers with an adapter; ``"all-linear"``: all but the head.
    """

    rank: int = 0
    alpha: float | None = None
    target_modules: str | Sequence[str] = "all-linear"

    def options(self) -> LoraOptions | None:
        """The adapter for an engine; None: there is none."""
        targets = self.target_modules
        named = targets if isinstance(targets, str) else tuple(targets)
        return LoraOptions(self.rank, self.alpha, named) if self.rank else None

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        if bad := [*wrong_types(self, "")]:
            yield from bad
            return
        try:
            wanted = self.options() is not None
        except UsageError as error:
            yield str(error).removeprefix("LoraOptions: ")
            return
        if not wanted and (self.alpha is not None or self.target_modules != "all-linear"):
            yield "rank=0: without a rank there is no adapter, and alpha and target_modules change nothing"
        if wanted and find_spec("peft") is None:
            yield f"rank={self.rank} needs peft: pip install 'rlmesh[lora]'"


@dataclass(frozen=True)
class ActorSettings(CheckedKeywords):
    """The policy in training.

    Attributes:
        ranks: number of processes that train it together.
        lr: peak learning rate of AdamW; 0: nothing is learnt.
        warmup_steps: steps over which the learning rate rises from 0.
        final_lr: the share of ``lr`` to which the rate falls linearly, and which it would reach right after the last
            step.
        weight_decay: weight decay of AdamW; norms and biases do not decay.
        max_grad_norm: the gradient is scaled down to at most this norm; 0: never.
        epochs: passes over each batch.
        minibatches: optimizer steps of a pass, each on an equal share of the prompts.
        token_budget: the most tokens of one forward and backward pass on a rank.
        activation_checkpointing: recompute activations in the backward pass.
        use_liger_kernel: use the fused layers of Liger; ``None``: on a GPU, if Liger is installed and knows the model.
        precision: dtype of forward and backward passes.
        threads: torch's threads in each rank; 0: torch's default.
        lora: train an adapter, and push the adapter alone to engines of transformers.
    """

    ranks: int = 1
    lr: float = 1e-6
    warmup_steps: int = 0
    final_lr: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = 1
    minibatches: int = 1
    token_budget: int = 8192
    activation_checkpointing: bool = False
    use_liger_kernel: bool | None = None
    precision: Precision = "float32"
    threads: int = 1
    lora: LoraSettings = field(default_factory=LoraSettings)

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        yield from too_small(self, 1, "ranks", "epochs", "minibatches", "token_budget")
        yield from too_small(self, 0, "lr", "warmup_steps", "weight_decay", "max_grad_norm", "threads")
        yield from too_large(self, 1, "lr", "weight_decay")
        yield from too_large(self, MOST_PROCESSES, "ranks")
        yield from too_large(self, MOST_THREADS, "threads")
        if not 0 <= self.final_lr <= 1:
            yield f"final_lr={self.final_lr} must be in [0, 1]: a share of lr"
        yield from (f"lora.{fault}" for fault in self.lora.faults())

    @property
    def updates(self) -> int:
        """The number of optimizer steps in a step of the run."""
        return self.epochs * self.minibatches

    def lr_share(self, update: int, steps: int) -> float:
        """The learning rate as a share of ``lr``: linear warm-up and linear decay, whichever is lower.

        Args:
            update: finished optimizer steps.
            steps: steps of the whole run.
        """
        up = (update + 1) / (self.warmup_steps * self.updates) if self.warmup_steps else 1.0
        down = 1 - (1 - self.final_lr) * min(update / (steps * self.updates), 1.0)
        return min(up, down)


@dataclass(frozen=True)
class CriticSettings(ActorSettings):
    """The value function in training, for algorithms that need one. It has all settings of the actor.

    Attributes:
        lr: peak learning rate of AdamW.
        model: a folder or hub name; ``None``: the run's model. A model with one label (a reward model) keeps its head;
            other models get a new one.
    """

    lr: float = 1e-5
    model: str | None = None

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.lora.rank:
            yield f"lora.rank={self.lora.rank}: only the actor trains an adapter; leave critic.lora out"


@dataclass(frozen=True)
class ReferenceSettings(CheckedKeywords):
    """The policy from which a divergence is measured: the policy before training, or a teacher.

    Attributes:
        model: a folder or hub name of a model with the same tokenizer; ``None``: the run's model.
    """

    model: str | None = None

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        return iter(())


@dataclass(frozen=True)
class RolloutSettings(CheckedKeywords):
    """The engines that sample.

    Attributes:
        engine: the kind of engine.
        engines: members of the role; each holds a whole model.
        max_tokens: the most tokens of a response.
        temperature: temperature of sampling, > 0; training computes log-probabilities at the same temperature.
        top_p: only the likeliest tokens that together have this probability are sampled, in (0, 1]; in validation too,
            unless it is greedy. So are top_k and min_p.
        top_k: only the k likeliest tokens are sampled; 0: all.
        min_p: only tokens with at least this share of the likeliest token's probability are sampled, in [0, 1). Samples
            carry the probability of all tokens that are kept, so that ratios are of whole vocabularies.
        stop: texts that end a response, also in validation; the response ends with the token that completes one.
        stop_token_ids: tokens that end a response, also in validation, besides the model's own end token.
        dtype: dtype of the engine's weights; the actor has float32, and a push casts its weights to this dtype.
        threads: torch's threads in each engine; 0: torch's default.
        options: further keyword arguments of the engine.
        time_limit_s: seconds after which a response ends with the tokens that it has, and the reason ``time``; 0: none.
        in_flight: prompts that an engine samples at a time in an asynchronous pipeline; 0: as many as fit its batch.
        dynamic_sampling: leave groups out whose responses all have the same reward, and draw others, so that each step
            has ``batch_size`` groups to learn from.
        refill: with dynamic sampling, at most ``refill * batch_size`` groups are left out per step; further ones stay.
        oversampling: with dynamic sampling, sample this many times the prompts that a step needs, so that groups that
            are left out have a replacement at once.
        deadline_s: the run ends with an error if training waits for samples, and for so many seconds no engine samples
            a token and no reward answers. The error names what it waits for. The engine ``vllm`` reports tokens at the
            end of each response, and an engine of your own at the end of each request.
    """

    engine: Literal["transformers", "vllm", "vllm-async"] = "transformers"
    engines: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    time_limit_s: float = 0.0
    in_flight: int = 0
    dynamic_sampling: bool = False
    refill: float = 2.0
    oversampling: float = 1.0
    deadline_s: float = 3600.0

    def faults(self) -> Iterator[str]:
        """One sentence per fault."""
        yield from too_small(self, 0, "time_limit_s", "in_flight", "refill", "threads")
        yield from too_small(self, 1, "oversampling", "engines", "max_tokens")
        yield from too_large(self, MOST_PROCESSES, "engines")
        yield from too_large(self, MOST_THREADS, "threads")
        if not 0 < self.deadline_s < float("inf"):
            yield f"deadline_s={self.deadline_s} must be a number of seconds > 0"
        if self.time_limit_s >= self.deadline_s:
            yield f"deadline_s={self.deadline_s} must be > time_limit_s={self.time_limit_s}, the most of a response"
        if self.oversampling > 1 and not self.dynamic_sampling:
            yield f"oversampling={self.oversampling} is for dynamic_sampling: without it every group is trained"
        if self.temperature <= 0:
            yield f"temperature={self.temperature} must be > 0: a policy is trained on what it samples"
        elif not COLDEST <= self.temperature <= HOTTEST:
            yield f"temperature={self.temperature} must be in [{COLDEST}, {HOTTEST}]"
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p} must be in (0, 1]; 1: all tokens"
        if self.top_k < 0:
            yield f"top_k={self.top_k} must be ≥ 0; 0: all tokens"
        if not 0 <= self.min_p < 1:
            yield f"min_p={self.min_p} must be in [0, 1); 0: all tokens"
        if not all(checked(text, str) and text for text in self.stops):
            yield f"stop={self.stop!r} must be a text or a list of texts that are not empty"
        if not all(checked(one, int) and one >= 0 for one in self.stop_token_ids):
            yield f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids: whole numbers ≥ 0"

    @property
    def casts(self) -> bool:
        """True if the engines' weights may have another dtype than the actor's."""
        return self.dtype != "float32" or "dtype" in self.options

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a response."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def params(self, *, greedy: bool, seed: int | None = None) -> SamplingParams:
        """The parameters of a request.

        Args:
            greedy: take the likeliest token each time, as in validation. Otherwise sample, as in training.
            seed: makes the draws reproducible.
        """
        from rlmesh.rl.engines.rollout import SamplingParams

        drawn: Mapping[str, Any] = {"temperature": 0.0}
        if not greedy:
            names = ("temperature", "top_p", "top_k", "min_p")
            drawn = {name: getattr(self, name) for name in names}
        return SamplingParams(
            self.max_tokens,
            **drawn,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids),
            seed=seed,
            time_limit_s=self.time_limit_s or None,
        )


def apply_overrides(settings: T, overrides: Sequence[str]) -> T:
    """Replace values of settings by ``section.key=value`` texts.

    Values are read by `rlmesh.rl.faults.value_of`: numbers, true, false, null, lists, and otherwise texts.

    Raises:
        UsageError: lists all faults: texts without ``=``, unknown keys with the nearest right one, wrong types.
    """
    faults: list[str] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            faults.append(f"{text!r} is no setting: write section.key=value")
            continue
        try:
            settings = _replaced(settings, path.strip().split("."), value_of(value.strip()), path.strip(), settings)
        except (UsageError, ValueError) as error:
            faults.append(str(error))
    if faults:
        raise UsageError("\n".join(faults))
    return settings


def checked(value: Any, kind: Any) -> bool:
    """True if a value has the type of a field. ``int`` is accepted for ``float``; ``bool``, NaN and
    infinity are not accepted for it."""
    if kind is Any:
        return True
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, types.UnionType):
        return any(checked(value, one) for one in get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    plain = origin or kind
    return isinstance(value, plain) if isinstance(plain, type) else True


def as_list(value: Any, kind: Any) -> Any:
    """A text such as ``a, b`` as a list, if the type is one of lists of texts, and not of texts too."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    of_texts = any(get_origin(one) is Sequence and get_args(one) == (str,) for one in kinds)
    if not isinstance(value, str) or str in kinds or not of_texts:
        return value
    return [part for each in value.split(",") if (part := each.strip())]


def wrong_types(settings: Any, where: str, but: Collection[str] = ()) -> Iterator[str]:
    """One sentence per field whose value has another type than the field, except the fields of ``but``."""
    hints = get_type_hints(type(settings))
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        if one.init and one.name not in but and not checked(value, hints[one.name]):
            yield f"{where}{one.name}={value!r} must be {kind_named(hints[one.name])}"


def _replaced(settings: Any, path: list[str], value: Any, whole: str, root: Any) -> Any:
    name, *rest = path
    known = {one.name for one in dataclasses.fields(settings) if one.init} if dataclasses.is_dataclass(settings) else {}
    if name not in known:
        raise UsageError(unknown_key(whole, dict(keys_of(root))))
    current = getattr(settings, name)
    if rest:
        return dataclasses.replace(settings, **{name: _replaced(current, rest, value, whole, root)})
    if not dataclasses.is_dataclass(current) or not isinstance(value, Mapping):
        kind = get_type_hints(type(settings))[name]
        value = as_list(value, kind)
        if not checked(value, kind):
            raise UsageError(f"{whole}={value!r} must be {kind_named(kind)}")
    return dataclasses.replace(settings, **{name: value})


def kind_named(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(kind_named(one) for one in get_args(kind))
    names = {
        int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null",
        Sequence: LIST, tuple: LIST, Mapping: "a mapping",
    }  # fmt: skip
    return names.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))
