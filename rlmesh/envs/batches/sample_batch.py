"""`SampleBatch`: the steps of one policy, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from rlmesh.envs.batches import columns
from rlmesh.errors import UsageError

__all__ = ["SampleBatch", "Tree", "as_column", "map_tree"]

Tree = Any
"""An array, or a dict or tuple of trees: the form of observations and actions of composed spaces."""


class SampleBatch(dict[str, Any]):
    """Steps of environments as columns of equal length: ``batch["obs"]`` is ``[steps, …]``.

    A column is an array, or, for dict and tuple spaces, a dict or tuple of arrays. Rows of one episode stand together
    and in order, unless the batch is shuffled. ``batch["dones"]`` is computed as ``terminateds | truncateds``.

    ``batch[10:20]`` and the batches of `minibatches` and `split_by_episode` are views of the same memory.

    Raises:
        UsageError: columns differ in length, or are no arrays.
    """

    OBS: ClassVar = columns.OBS
    NEW_OBS: ClassVar = columns.NEW_OBS
    NEXT_OBS: ClassVar = columns.NEW_OBS
    ACTIONS: ClassVar = columns.ACTIONS
    REWARDS: ClassVar = columns.REWARDS
    TERMINATEDS: ClassVar = columns.TERMINATEDS
    TRUNCATEDS: ClassVar = columns.TRUNCATEDS
    DONES: ClassVar = columns.DONES
    INFOS: ClassVar = columns.INFOS
    EPS_ID: ClassVar = columns.EPS_ID
    T: ClassVar = columns.T
    ACTION_LOGP: ClassVar = columns.ACTION_LOGP
    ACTION_DIST_INPUTS: ClassVar = columns.ACTION_DIST_INPUTS
    VF_PREDS: ClassVar = columns.VF_PREDS
    ADVANTAGES: ClassVar = columns.ADVANTAGES
    VALUE_TARGETS: ClassVar = columns.VALUE_TARGETS

    def __init__(self, given: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **more: Any) -> None:
        super().__init__()
        for name, value in {**dict(given), **more}.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise UsageError(f"a column's name is text, not {name!r}; rows are read by batch[{name!r}] only")
        if name == columns.DONES:
            raise UsageError(
                "the column dones is computed from terminateds and truncateds: set these two; a step that ends an "
                "episode for good is terminated, a step that is the last because of a time limit is truncated"
            )
        column = as_column(name, value)
        others = [each for each in self if each != name]
        if others and (length := tree_length(column)) != len(self):
            raise UsageError(f"column {name!r} has {length} rows, the others ({others[0]!r}, …) have {len(self)}")
        super().__setitem__(name, column)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several columns, each with the checks of a single one."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key == columns.DONES:
                return np.logical_or(super().__getitem__(columns.TERMINATEDS), super().__getitem__(columns.TRUNCATEDS))
            try:
                return super().__getitem__(key)
            except KeyError:
                raise KeyError(f"the batch has no column {key!r}; it has {', '.join(self)}") from None
        if isinstance(key, slice | np.ndarray | list):
            index = key if isinstance(key, slice) else np.asarray(key)
            return _unchecked({name: map_tree(lambda leaf: leaf[index], column) for name, column in self.items()})
        raise UsageError(f"batch[…]: the name of a column, a slice or an array of rows, not {key!r}")

    def __contains__(self, name: object) -> bool:
        if name == columns.DONES:
            return super().__contains__(columns.TERMINATEDS) and super().__contains__(columns.TRUNCATEDS)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (this is get)

    def __len__(self) -> int:
        """Number of rows; of columns there are ``len(batch.keys())``."""
        return next((tree_length(column) for column in self.values()), 0)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __eq__(self, other: object) -> bool:
        """True if both have the same columns with equal contents; NaN equals NaN."""
        if not isinstance(other, SampleBatch):
            return NotImplemented
        return self.keys() == other.keys() and all(_same(self[name], other[name]) for name in self)

    def __ne__(self, other: object) -> bool:  # dict has its own
        return not self == other

    __hash__ = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self)

    def env_steps(self) -> int:
        """Number of steps of environments: one per row."""
        return len(self)

    def agent_steps(self) -> int:
        """Number of steps of agents: one per row."""
        return len(self)

    @property
    def size_bytes(self) -> int:
        """Size of all columns in bytes; of object columns, the references alone."""
        return sum(leaf.nbytes for column in self.values() for leaf in leaves(column))

    def copy(self, shallow: bool = False) -> SampleBatch:
        """The same rows in memory of their own, or, if shallow, other columns on the same memory."""
        return _unchecked({name: map_tree(np.copy, column) if not shallow else column for name, column in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unchecked, (dict(self.items()),))

    @staticmethod
    def concat_samples(batches: Iterable[SampleBatch | Any]) -> Any:
        """Join batches, in their order: `SampleBatch` of sample batches, `MultiAgentBatch` of multi-agent ones.

        Raises:
            UsageError: there are no batches, or they differ in their columns or kinds.
        """
        from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch

        given = list(batches)
        if not given:
            raise UsageError("concat_samples: there is no batch to join")
        if any(isinstance(batch, MultiAgentBatch) for batch in given):
            return MultiAgentBatch.concat_samples(given)
        wrong = next((batch for batch in given if not isinstance(batch, SampleBatch)), None)
        if wrong is not None:
            hint = "; a future's value is read by .result()" if hasattr(wrong, "result") else ""
            raise UsageError(f"concat_samples joins SampleBatch objects, not {type(wrong).__name__}{hint}")
        filled = [batch for batch in given if len(batch)] or given[:1]
        names = filled[0].keys()
        for batch in filled:
            if batch.keys() != names:
                odd = sorted(batch.keys() ^ names)
                raise UsageError(f"concat_samples: the column {odd[0]!r} is not in all batches")
        if len(filled) == 1:
            return filled[0].copy(shallow=True)
        return _unchecked({name: _joined([batch[name] for batch in filled]) for name in names})

    def concat(self, other: SampleBatch) -> SampleBatch:
        """The rows of this batch, then those of another one."""
        joined: SampleBatch = SampleBatch.concat_samples([self, other])
        return joined

    def slice(self, start: int, end: int) -> SampleBatch:
        """Rows ``start`` to ``end``, as a view."""
        rows: SampleBatch = self[start:end]
        return rows

    def shuffle(self, rng: np.random.Generator | None = None) -> SampleBatch:
        """The same rows in random order, in memory of their own; the columns stay aligned.

        Args:
            rng: source of the order; without it, NumPy's fresh default generator.
        """
        order = (rng or np.random.default_rng()).permutation(len(self))
        rows: SampleBatch = self[order]
        return rows

    def minibatches(
        self, size: int, *, epochs: int = 1, shuffle: bool = True, rng: np.random.Generator | None = None
    ) -> Iterator[SampleBatch]:
        """Batches of ``size`` rows that cover this batch once per epoch; the last one of an epoch may be smaller.

        Args:
            size: rows per minibatch.
            epochs: how often each row is used.
            shuffle: draw a new order in each epoch.
            rng: source of the order.
        """
        if size < 1:
            raise UsageError(f"minibatches(size={size}): a minibatch has at least 1 row")
        rng = rng or np.random.default_rng()
        for _ in range(epochs):
            order = rng.permutation(len(self)) if shuffle else None
            for start in range(0, len(self), size):
                yield self[order[start : start + size]] if order is not None else self[start : start + size]

    def split_by_episode(self, key: str | None = None) -> list[SampleBatch]:
        """One batch per run of rows with the same episode, as views.

        Args:
            key: the column that names episodes. Without it: ``eps_id`` if the batch has it, else ``dones``.
        """
        if key is None:
            key = columns.EPS_ID if columns.EPS_ID in self else columns.DONES
        if key not in self:
            raise UsageError(f"split_by_episode: the batch has no column {key!r}; it has {', '.join(self)}")
        if not len(self):
            return []
        column = self[key]
        edges = np.flatnonzero(column[:-1]) if key == columns.DONES else np.flatnonzero(column[1:] != column[:-1])
        cuts = [0, *(int(edge) + 1 for edge in edges), len(self)]
        return [self[start:end] for start, end in pairwise(cuts)]

    def timeslices(self, size: int) -> list[SampleBatch]:
        """Consecutive views of ``size`` rows, the last one with the rest."""
        if size < 1:
            raise UsageError(f"timeslices(size={size}): a slice has at least 1 row")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def time_major(self, max_length: int | None = None) -> tuple[SampleBatch, np.ndarray]:
        """Episodes side by side, padded with zeros at their ends, for recurrent modules.

        Args:
            max_length: longer episodes are cut into sequences of this many rows.

        Returns:
            A batch of columns ``[time, sequence, …]``, and the lengths ``[sequence]`` (int64). Rows of it are times.
        """
        sequences = [
            part for episode in self.split_by_episode() for part in episode.timeslices(max_length or len(episode))
        ]
        lengths = np.array([len(part) for part in sequences], dtype=np.int64)
        rows = np.concatenate([np.arange(length) for length in lengths]) if len(lengths) else np.zeros(0, np.int64)
        which = np.repeat(np.arange(len(lengths)), lengths)
        longest = int(lengths.max(initial=0))

        def pad(leaf: np.ndarray) -> np.ndarray:
            padded = np.zeros((longest, len(lengths), *leaf.shape[1:]), leaf.dtype)
            padded[rows, which] = leaf
            return padded

        return _unchecked({name: map_tree(pad, column) for name, column in self.items()}), lengths

    def as_multi_agent(self, policy_id: str = "default_policy") -> Any:
        """This batch as the `MultiAgentBatch` of one policy."""
        from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch

        return MultiAgentBatch({policy_id: self}, len(self))

    def __repr__(self) -> str:
        names = sorted([*self.keys(), *([columns.DONES] if columns.DONES in self else [])])
        text = ",\n    ".join(f"{name!r}: {_summary(self[name])}" for name in names)
        return f"{{ {text}\n}}"


def as_column(name: str, value: Any) -> Tree:
    """The value as a column: arrays unchanged, sequences as arrays, dicts and tuples of them leaf by leaf."""
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            raise UsageError(f"column {name!r}: a column has one row per step, not a single value")
        return value
    if isinstance(value, Mapping):
        return {key: as_column(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, tuple) and value and all(isinstance(each, np.ndarray | Mapping | tuple) for each in value):
        return tuple(as_column(f"{name}.{i}", each) for i, each in enumerate(value))
    if type(value).__module__.partition(".")[0] == "torch":
        return value.detach().cpu().numpy()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if value and isinstance(value[0], Mapping):
            objects = np.empty(len(value), dtype=object)
            objects[:] = value
            return objects
        return np.asarray(value)
    raise UsageError(f"column {name!r}: an array, a sequence or a dict of arrays, not {type(value).__name__}")


def map_tree(fn: Any, tree: Tree) -> Tree:
    """The tree with ``fn(leaf)`` in place of each array."""
    if isinstance(tree, np.ndarray):
        return fn(tree)
    if isinstance(tree, Mapping):
        return {key: map_tree(fn, each) for key, each in tree.items()}
    return tuple(map_tree(fn, each) for each in tree)


def leaves(tree: Tree) -> Iterator[np.ndarray]:
    """The arrays of a tree, in its order."""
    if isinstance(tree, np.ndarray):
        yield tree
    else:
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(each)


def tree_length(tree: Tree) -> int:
    """Number of rows of a tree: the length of its arrays, which must agree."""
    found = {len(leaf) for leaf in leaves(tree)}
    if len(found) > 1:
        raise UsageError(f"the arrays of one column differ in length: {sorted(found)}")
    return found.pop() if found else 0


def _unchecked(given: dict[str, Any]) -> SampleBatch:
    """A batch of columns that are known to be valid."""
    batch = SampleBatch()
    dict.update(batch, given)
    return batch


def _joined(trees: list[Tree]) -> Tree:
    first = trees[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(trees)
    if isinstance(first, Mapping):
        return {key: _joined([tree[key] for tree in trees]) for key in first}
    return tuple(_joined([tree[i] for tree in trees]) for i in range(len(first)))


def _same(one: Tree, other: Tree) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.dtype == object:
            return all(a == b for a, b in zip(one.ravel(), other.ravel(), strict=True))
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return all(_same(a, b) for a, b in zip(one, other, strict=True))


def _summary(tree: Tree) -> str:
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {_summary(each)}" for key, each in tree.items()) + "}"
    if isinstance(tree, tuple):
        return "(" + ", ".join(map(_summary, tree)) + ")"
    shape = f"np.ndarray({tree.shape}, dtype={tree.dtype}"
    if tree.dtype == object:
        return f"{shape}, head={tree.flat[0]!r:.80})" if tree.size else f"{shape})"
    if not tree.size or tree.dtype.kind not in "biuf":
        return f"{shape})"
    least, most, mean = float(tree.min()), float(tree.max()), float(tree.mean(dtype=np.float64))
    return f"{shape}, min={_rounded(least)}, max={_rounded(most)}, mean={_rounded(mean)})"


def _rounded(value: float) -> str:
    return str(round(value, 3))
