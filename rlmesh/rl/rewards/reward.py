"""`Reward`: a function that scores a response, with a name, a weight, and the rows that it is for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlmesh.errors import UsageError
from rlmesh.rl.faults import CheckedKeywords, did_you_mean, unknown_parameters
from rlmesh.rl.types import Episode

__all__ = ["Response", "Reward"]

_SINGLE = {
    "sample": "the response with its tokens (Response)",
    "row": "the row of the data set",
    "response": "the text of the response",
    "solution_str": "the text of the response",
    "prompt": "the text of the prompt",
    "ground_truth": "the right answer of the row",
    "data_source": "the name of the row's data set",
    "extra_info": "what else the row has",
}
_BATCHED = {
    "samples": "sample",
    "rows": "row",
    "responses": "response",
    "solution_strs": "solution_str",
    "prompts": "prompt",
    "ground_truths": "ground_truth",
    "data_sources": "data_source",
    "extra_infos": "extra_info",
}

_OF_TRL = {"completions": "responses", "completion_ids": "samples"}
"""Inputs of TRL's reward functions with other names here."""
_OTHERWISE = "; 'row' has all columns of the data, and Reward(…, options={…}) gives other arguments"


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A response, as passed to reward functions.

    Attributes:
        token_ids: all tokens that the policy sampled.
        text: the text of these tokens, without special tokens.
        prompt: the text of the prompt.
        episode: the whole episode, with all turns.
    """

    token_ids: Sequence[int]
    text: str
    prompt: str
    episode: Episode

    @property
    def finish_reason(self) -> str:
        """The reason for the end of the response."""
        return self.episode.finish_reason


@dataclass(frozen=True)
class Reward(CheckedKeywords):
    """A reward function, with its weight and settings.

    The names of the function's parameters select its inputs, in any order: ``sample``, ``row``, ``response`` (or
    ``solution_str``), ``prompt``, ``ground_truth``, ``data_source``, ``extra_info``. With the plurals (``samples``,
    ``rows``, …) it gets lists and returns a list of the same length. It may be ``async``. For return values, see
    :func:`rlmesh.rl.rewards.outcomes.to_outcome`.

    Attributes:
        function: scores one response, or a batch of them.
        weight: weight in the sum of an episode's rewards.
        name: name in metrics; ``""``: the function's name.
        sources: the name or names of data sets (``data_source``) whose rows it scores; it abstains on other rows.
            Empty: it scores all rows.
        inline: call the function in this process, without a deadline. Otherwise it runs in a process pool, which kills
            calls that hang. Async functions always run in this process.
        timeout_s: time limit of one call, for one response or for a batch.
        options: further keyword arguments of the function.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str = ""
    sources: str | Sequence[str] = ()
    inline: bool = False
    timeout_s: float = 10.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.function):
            given: Any = self.function
            hint = "; names are for files of settings" if isinstance(given, str) else ""
            raise UsageError(f"a reward is a function, such as gsm8k.compute_score, got {given!r:.80}{hint}")
        object.__setattr__(self, "sources", source_names(self.sources))
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.function))
        weight, timeout_s = number_of(self.weight), number_of(self.timeout_s)
        if weight is None:
            raise UsageError(f"reward {self.name!r}: weight={self.weight!r} must be a finite number")
        if timeout_s is None or timeout_s <= 0:
            raise UsageError(f"reward {self.name!r}: timeout_s={self.timeout_s!r} must be a number > 0")
        self.wanted()

    @property
    def is_async(self) -> bool:
        """The function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )

    @property
    def batched(self) -> bool:
        """The function takes lists."""
        return any(name in _BATCHED for name in self.wanted())

    def wanted(self) -> tuple[str, ...]:
        """The names of the inputs that the function takes.

        Raises:
            UsageError: an input does not exist, or single values and lists are mixed.
        """
        return self._wanted

    @cached_property  # to read a signature takes longer than many a reward
    def _wanted(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.function).parameters.values()
        known = {**_SINGLE, **_BATCHED}
        wanted = [p.name for p in parameters if p.name in known and p.name not in self.options]
        if unknown := unknown_parameters(self.function, {*known, *self.options}):
            name = _OF_TRL.get(unknown[0])
            hint = f"; in place of TRL's {unknown[0]!r}, write {name!r}" if name else did_you_mean(unknown[0], known)
            raise UsageError(
                f"reward {self.name!r} has a parameter {unknown[0]!r} without a default; it may have "
                f"{', '.join(_SINGLE)}, or their plurals for a batch{hint or _OTHERWISE}"
            )
        if not wanted:
            raise UsageError(f"reward {self.name!r} takes no input: give it some parameters of {', '.join(_SINGLE)}")
        if len({name in _BATCHED for name in wanted}) > 1:
            raise UsageError(f"reward {self.name!r} mixes parameters of one response and of many: {', '.join(wanted)}")
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if positional:
            raise UsageError(f"reward {self.name!r}: {positional[0]!r} is positional only; arguments go by name")
        return tuple(wanted)

    def scores(self, row: Mapping[str, Any]) -> bool:
        """True if the reward is for this row."""
        return not self.sources or row.get("data_source") in self.sources

    def arguments(self, responses: Sequence[Response], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The keyword arguments of a call, for one response or a batch.

        Raises:
            UsageError: a row lacks an input of the function.
        """
        found: dict[str, Any] = dict(self.options)
        for name in self.wanted():
            single = _BATCHED.get(name, name)
            values = [self._value(single, response, row) for response, row in zip(responses, rows, strict=True)]
            found[name] = values if name in _BATCHED else values[0]
        return found

    def _value(self, name: str, response: Response, row: Mapping[str, Any]) -> Any:
        if name in ("response", "solution_str"):
            return response.text
        if name == "sample":
            return response
        if name == "prompt":
            return response.prompt
        if name == "row":
            return row
        if name == "extra_info":
            return row.get("extra_info")
        if fault := self._lacks(name, row):
            raise UsageError(fault)
        return ground_truth_of(row) if name == "ground_truth" else row.get(name)

    def lacks(self, row: Mapping[str, Any]) -> str:
        """A sentence about an input of the function that a row lacks; ``""`` if it has all."""
        wanted = (_BATCHED.get(name, name) for name in self.wanted())
        return next(filter(None, (self._lacks(name, row) for name in wanted)), "")

    def _lacks(self, name: str, row: Mapping[str, Any]) -> str:
        if name not in ("ground_truth", "data_source"):
            return ""
        if (ground_truth_of(row) if name == "ground_truth" else row.get(name)) is not None:
            return ""
        where = "reward_model.ground_truth or ground_truth" if name == "ground_truth" else name
        return f"reward {self.name!r} wants {name!r}, but the row has no {where}: it has {sorted(row)}"


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """The right answer of a row: ``reward_model.ground_truth``, or a column ``ground_truth``; ``None`` if neither."""
    nested = row.get("reward_model")
    if isinstance(nested, Mapping) and nested.get("ground_truth") is not None:
        return nested["ground_truth"]
    return row.get("ground_truth")


def number_of(given: Any) -> float | None:
    """A finite number; None if the value is none."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if is_number and math.isfinite(given) else None


def source_names(given: Any) -> tuple[str, ...]:
    """Names of data sets as a tuple; a text is one name.

    Raises:
        UsageError: they are no names.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"sources={given!r} must be the name of a data set, or a list of names")
    return names


def _name_of(function: Callable[..., Any]) -> str:
    """``gsm8k`` for ``gsm8k.compute_score``, otherwise the function's own name."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if name == "compute_score":
        return str(getattr(function, "__module__", name)).rpartition(".")[2]
    return name
