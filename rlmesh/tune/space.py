"""Search spaces: values of settings that a search chooses, with the names and bounds of Ray Tune.

=====================================  ========================================================================
``grid_search([a, b])``                every value, combined with every value of the other grids
``choice([a, b])``                     one of the values, each as likely
``uniform(low, high)``                 a float; ``loguniform``: its logarithm is uniform
``quniform(low, high, q)``             rounded to multiples of q; both bounds are such multiples
``randn(mean, sd)``                    a float of a normal distribution; ``qrandn(mean, sd, q)`` rounds it
``randint(low, high)``                 a whole number below ``high``; ``lograndint``: its logarithm is uniform
``qrandint(low, high, q)``             a multiple of q, ``high`` included; ``qlograndint`` likewise
``sample_from(fn)``                    ``fn(spec)`` with the other values in ``spec.config``
=====================================  ========================================================================
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlmesh.errors import UsageError

__all__ = [
    "Domain", "Path", "choice", "fill", "find", "grid_search", "lograndint", "loguniform", "named", "qlograndint",
    "qloguniform", "qrandint", "qrandn", "quniform", "randint", "randn", "sample_from", "uniform", "variants",
]  # fmt: skip

Path = tuple[str | int, ...]
"""The place of a value in nested settings."""
GRID = "grid_search"


class Domain:
    """The values that a setting may have."""

    def sample(self, rng: random.Random) -> Any:
        """A value at random."""
        raise NotImplementedError


@dataclass(frozen=True)
class GridDomain(Domain):
    """Values that are all tried."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class ChoiceDomain(Domain):
    """A list of values, one of which is drawn."""

    values: tuple[Any, ...]

    def sample(self, rng: random.Random) -> Any:
        return rng.choice(self.values)


@dataclass(frozen=True)
class NumberDomain(Domain):
    """Numbers from ``low`` to ``high``, both included for whole numbers.

    Attributes:
        whole: whole numbers.
        log: the logarithm is uniform.
        q: numbers are multiples of it; None: all numbers.
    """

    low: float
    high: float
    whole: bool = False
    log: bool = False
    q: float | None = None

    def sample(self, rng: random.Random) -> Any:
        if self.whole and not self.log:
            step = int(self.q or 1)
            return step * rng.randint(-(-int(self.low) // step), int(self.high) // step)
        # A whole number n stands for the interval from n to n + 1 - its share of a uniform logarithm.
        high = self.high + 1 if self.whole and self.q is None else self.high
        value = math.exp(rng.uniform(math.log(self.low), math.log(high))) if self.log else rng.uniform(self.low, high)
        if self.q is not None:
            value = rounded(value, self.q, self.low, self.high)
        elif not self.whole:
            value = min(max(value, self.low), self.high)  # exp and log round
        return min(max(math.floor(value), int(self.low)), int(self.high)) if self.whole else value


@dataclass(frozen=True)
class NormalDomain(Domain):
    """Numbers of a normal distribution."""

    mean: float
    sd: float
    q: float | None = None

    def sample(self, rng: random.Random) -> Any:
        value = rng.gauss(self.mean, self.sd)
        return value if self.q is None else rounded(value, self.q, -math.inf, math.inf)


@dataclass(frozen=True)
class FunctionDomain(Domain):
    """A value that a function computes from the others."""

    function: Callable[[Any], Any]


class _Values(dict[str, Any]):
    """Settings by item and by attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class _Spec:
    """The argument of the function of ``sample_from``."""

    config: _Values

    def __getitem__(self, name: str) -> Any:
        return self.config[name]


def rounded(value: float, q: float, low: float, high: float) -> float:
    """The nearest multiple of q within the bounds."""
    number = round(value / q)
    if math.isfinite(low):
        number = min(max(number, math.ceil(low / q - 1e-9)), math.floor(high / q + 1e-9))
    return round(number * q, 12)


def grid_search(values: Iterable[Any]) -> dict[str, list[Any]]:
    """Every value; several grids are combined. ``{"grid_search": values}`` in JSON is the same."""
    return {GRID: list(_some(GRID, values))}


def choice(categories: Iterable[Any]) -> Domain:
    """One of the values."""
    return ChoiceDomain(tuple(_some("choice", categories)))


def uniform(lower: float, upper: float) -> Domain:
    """A float between the bounds."""
    return _floats("uniform", lower, upper)


def quniform(lower: float, upper: float, q: float) -> Domain:
    """A float between the bounds, both included, rounded to multiples of q."""
    return _floats("quniform", lower, upper, q=q)


def loguniform(lower: float, upper: float) -> Domain:
    """A float between the bounds, whose logarithm is uniform."""
    return _floats("loguniform", lower, upper, log=True)


def qloguniform(lower: float, upper: float, q: float) -> Domain:
    """A float whose logarithm is uniform, rounded to multiples of q."""
    return _floats("qloguniform", lower, upper, log=True, q=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """A float of a normal distribution."""
    return _normal("randn", mean, sd, None)


def qrandn(mean: float, sd: float, q: float) -> Domain:
    """A float of a normal distribution, rounded to multiples of q."""
    return _normal("qrandn", mean, sd, q)


def randint(lower: int, upper: int) -> Domain:
    """A whole number of at least ``lower`` and below ``upper``."""
    return _integers("randint", lower, upper)


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """A multiple of q between the bounds, both included."""
    return _integers("qrandint", lower, upper, q=q)


def lograndint(lower: int, upper: int) -> Domain:
    """A whole number of at least ``lower`` and below ``upper``, whose logarithm is about uniform."""
    return _integers("lograndint", lower, upper, log=True)


def qlograndint(lower: int, upper: int, q: int) -> Domain:
    """A multiple of q between the bounds, both included, whose logarithm is about uniform."""
    return _integers("qlograndint", lower, upper, log=True, q=q)


def sample_from(func: Callable[[Any], Any]) -> Domain:
    """A value computed from the others: ``sample_from(lambda spec: 2 * spec.config.lr)``."""
    if not callable(func):
        raise UsageError(f"tune.sample_from: a function, not {func!r}")
    return FunctionDomain(func)


def _some(name: str, values: Iterable[Any]) -> list[Any]:
    some = [] if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__") else list(values)
    if not some:
        raise UsageError(f"tune.{name}: a list of at least one value, not {values!r}")
    return some


def _floats(name: str, low: Any, high: Any, *, log: bool = False, q: Any = None) -> Domain:
    _bounds(name, (int, float), low, high, log)
    if q is not None:
        _step(name, (int, float), q)
        for bound in (low, high):
            if not math.isclose(bound / q, round(bound / q), abs_tol=1e-9):
                raise UsageError(f"tune.{name}({low}, {high}, {q}): {bound} is no multiple of {q}")
    return NumberDomain(float(low), float(high), log=log, q=q)


def _integers(name: str, low: Any, high: Any, *, log: bool = False, q: Any = None) -> Domain:
    _bounds(name, (int,), low, high, log)
    if q is not None:
        _step(name, (int,), q)
        if -(-low // q) > high // q:
            raise UsageError(f"tune.{name}({low}, {high}, {q}): there is no multiple of {q} between the bounds")
    return NumberDomain(low, high if q is not None else high - 1, whole=True, log=log, q=q)


def _normal(name: str, mean: Any, sd: Any, q: Any) -> Domain:
    numbers = all(type(value) in (int, float) and math.isfinite(value) for value in (mean, sd))
    if not numbers or sd < 0:
        raise UsageError(f"tune.{name}({mean!r}, {sd!r}): a mean, and a standard deviation of at least 0")
    if q is not None:
        _step(name, (int, float), q)
    return NormalDomain(mean, sd, q)


def _bounds(name: str, kinds: tuple[type, ...], low: Any, high: Any, log: bool) -> None:
    what = "whole numbers" if kinds == (int,) else "numbers"
    if not all(type(bound) in kinds and math.isfinite(bound) for bound in (low, high)):
        raise UsageError(f"tune.{name}({low!r}, {high!r}): the bounds are {what}")
    if low >= high:
        raise UsageError(f"tune.{name}({low!r}, {high!r}): the first bound must be below the second")
    if log and low <= 0:
        raise UsageError(f"tune.{name}({low!r}, {high!r}): a logarithm needs bounds above 0")


def _step(name: str, kinds: tuple[type, ...], q: Any) -> None:
    if type(q) not in kinds or not q > 0:
        raise UsageError(f"tune.{name}(…, q={q!r}): a number above 0")


def find(values: Any, path: Path = ()) -> dict[Path, Domain]:
    """The domains within nested settings, by their place."""
    if isinstance(values, Domain):
        return {path: values}
    found: dict[Path, Domain] = {}
    if isinstance(values, Mapping):
        if set(values) == {GRID}:
            return {path: GridDomain(tuple(_some(GRID, values[GRID])))}
        for key, value in values.items():
            found.update(find(value, (*path, key)))
    elif type(values) in (list, tuple):
        for i, value in enumerate(values):
            found.update(find(value, (*path, i)))
    return found


def fill(values: Any, chosen: Mapping[Path, Any], path: Path = ()) -> Any:
    """The settings with the chosen values in the places of domains; parts without a domain are not copied."""
    if path in chosen:
        return chosen[path]
    if not any(place[: len(path)] == path for place in chosen):
        return values
    if isinstance(values, Mapping):
        return {key: fill(value, chosen, (*path, key)) for key, value in values.items()}
    return type(values)(fill(value, chosen, (*path, i)) for i, value in enumerate(values))


def named(path: Path) -> str:
    """``model/fcnet_hiddens``: a place as text."""
    return "/".join(map(str, path))


def draw(space: Mapping[Path, Domain], fixed: Mapping[Path, Any], rng: random.Random) -> dict[Path, Any]:
    """Values for all domains: the given ones, random ones, and those computed from them."""
    chosen: dict[Path, Any] = {}
    for path, domain in space.items():
        if path in fixed:
            chosen[path] = fixed[path]
        elif not isinstance(domain, FunctionDomain):
            chosen[path] = domain.sample(rng)
    known = _Values({str(path[-1]): value for path, value in chosen.items()})
    for path, domain in space.items():
        if isinstance(domain, FunctionDomain):
            chosen[path] = domain.function(_Spec(known))
    return {path: chosen[path] for path in space}


def variants(space: Mapping[Path, Domain], num_samples: int, seed: int) -> Iterator[dict[Path, Any]]:
    """``num_samples`` times all combinations of the grids, each with random values for the other domains.

    The values of a trial are a function of the seed and of its number.
    """
    grids = {path: domain.values for path, domain in space.items() if isinstance(domain, GridDomain)}
    combinations = [dict(zip(grids, values, strict=True)) for values in product(*grids.values())]
    for number, fixed in enumerate(fixed for _ in range(num_samples) for fixed in combinations):
        yield draw(space, fixed, random.Random(f"{seed}/{number}"))
