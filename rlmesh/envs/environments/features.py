"""Features of observations: a vector of fixed length for an observation of any space of Gymnasium."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlmesh.errors import UsageError

__all__ = ["SEQUENCE_LENGTH", "Writer", "characters_of", "features_of", "has_bound", "whole_numbers"]

SEQUENCE_LENGTH = 16
"""Elements of a Sequence, and nodes and edges of a Graph, that a vector holds if no other number is set."""

Writer = Callable[[np.ndarray, Any], None]
"""Fills a vector of zeros with the features of an observation."""


def has_bound(space: Any) -> bool:
    """True for spaces that ``gymnasium.spaces.flatten`` turns into vectors of this module's form."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(map(has_bound, space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces))
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def features_of(space: Any, most: int = SEQUENCE_LENGTH) -> tuple[int, Writer]:
    """Number of features of a space, and the function that writes them.

    ====================  ==========================================================================================
    Box, MultiBinary      the elements
    Discrete              one-hot; MultiDiscrete: one after the other
    Dict, Tuple           the parts one after the other, as ``gymnasium.spaces.flatten`` has them
    OneOf                 one-hot which part; then all parts, zeros for those that are not there
    Text                  one-hot characters, ``max_length`` of them; the last class means the end of the text
    Sequence              ``most`` elements, each 1 and its features; zeros behind the last one
    Graph                 ``most`` nodes like a Sequence; ``most`` edges, each with one-hot ends too
    ====================  ==========================================================================================

    Args:
        most: largest number of elements of a Sequence, and of nodes and edges of a Graph.

    Raises:
        UsageError: the space is none of Gymnasium's. Writers raise it for observations that the space does not contain.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return math.prod(space.shape), _numbers(tuple(space.shape), np.dtype(space.dtype))
    if isinstance(space, spaces.Discrete):
        return int(space.n), _choices(np.array([space.n]), np.array([space.start]), ())
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum()), _choices(space.nvec.ravel(), space.start.ravel(), tuple(space.shape))
    if isinstance(space, spaces.Dict):
        return _composed([(key, *features_of(each, most)) for key, each in space.spaces.items()], Mapping)
    if isinstance(space, spaces.Tuple):
        return _composed([(i, *features_of(each, most)) for i, each in enumerate(space.spaces)], tuple | list)
    if isinstance(space, spaces.OneOf):
        return _one_of([features_of(each, most) for each in space.spaces])
    if isinstance(space, spaces.Text):
        return _text(space)
    if isinstance(space, spaces.Sequence):
        width, write = _elements(*features_of(space.feature_space, most), most, "Sequence")
        return width, _stacked(space, write) if space.stack else write
    if isinstance(space, spaces.Graph):
        return _graph(space, most)
    raise UsageError(f"the observation space {space} is none of Gymnasium's, so its observations have no known form")


def _refused(what: str) -> UsageError:
    return UsageError(f"{what}: the environment returns something that its observation_space does not contain")


def whole_numbers(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """The array, in the type of its space if that has whole numbers; None if these do not fit, which NumPy wraps."""
    if dtype.kind not in "iu":
        return array
    found = array.astype(dtype)
    return found if np.array_equal(found, array) else None


def _numbers(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Writer:
    def write(out: np.ndarray, value: Any) -> None:
        array = np.asarray(value)
        if array.shape != shape:
            raise _refused(f"an observation has shape {array.shape}, its space {shape}")
        if not np.can_cast(array.dtype, out.dtype, "same_kind"):
            raise _refused(f"an observation has elements of {array.dtype}, its space of {out.dtype}")
        if array.dtype != dtype and whole_numbers(array, dtype) is None:
            raise _refused(f"an observation has numbers that do not fit {dtype}, the type of its space")
        out[:] = array.ravel()

    return write


def _choices(sizes: np.ndarray, starts: np.ndarray, shape: tuple[int, ...]) -> Writer:
    first = np.cumsum(sizes) - sizes

    def write(out: np.ndarray, value: Any) -> None:
        array = np.asarray(value)
        chosen = array.ravel() - starts
        if array.shape != shape or (chosen < 0).any() or (chosen >= sizes).any():
            raise _refused(f"an observation is {value!r}, its space has {sizes.tolist()} values from {starts.tolist()}")
        out[first + chosen.astype(np.int64)] = 1

    return write


def _composed(parts: list[tuple[Any, int, Writer]], kind: Any) -> tuple[int, Writer]:
    edges = np.cumsum([0, *(width for _, width, _ in parts)]).tolist()
    keys = {key for key, _, _ in parts}

    def write(out: np.ndarray, value: Any) -> None:
        found = set(value) if isinstance(value, Mapping) else set(range(len(value)))
        if not isinstance(value, kind) or found != keys:
            raise _refused(
                f"an observation has the parts {sorted(map(str, found))}, its space {sorted(map(str, keys))}"
            )
        for i, (key, _, each) in enumerate(parts):
            each(out[edges[i] : edges[i + 1]], value[key])

    return edges[-1], write


def _one_of(parts: list[tuple[int, Writer]]) -> tuple[int, Writer]:
    edges = np.cumsum([len(parts), *(width for width, _ in parts)]).tolist()

    def write(out: np.ndarray, value: Any) -> None:
        which, part = value
        if not 0 <= which < len(parts):
            raise _refused(f"an observation is of part {which}, its space has {len(parts)}")
        out[which] = 1
        parts[which][1](out[edges[which] : edges[which + 1]], part)

    return edges[-1], write


def characters_of(space: Any) -> list[str]:
    """The characters of a Text space, in an order that is the same in each process.

    Some versions of Gymnasium list them in the order of a set, which differs from process to process.
    """
    return sorted(space.character_set)


def _text(space: Any) -> tuple[int, Writer]:
    places = {char: i for i, char in enumerate(characters_of(space))}
    most, classes = int(space.max_length), len(places) + 1

    def write(out: np.ndarray, value: Any) -> None:
        if len(value) > most or any(char not in places for char in value):
            raise _refused(f"an observation is the text {value!r}, its space is {space}")
        chosen = [places[char] for char in value] + [classes - 1] * (most - len(value))
        out[np.arange(most) * classes + chosen] = 1

    return most * classes, write


def _elements(width: int, writer: Writer, most: int, name: str) -> tuple[int, Writer]:
    def write(out: np.ndarray, value: Any) -> None:
        if len(value) > most:
            raise UsageError(
                f"an observation has {len(value)} elements of a {name}, and a row has room for {most}: set "
                f"environment(max_sequence_length={len(value)}) or more"
            )
        for slot, each in zip(out.reshape(most, 1 + width), value, strict=False):
            slot[0] = 1
            writer(slot[1:], each)

    return most * (1 + width), write


def _stacked(space: Any, write: Writer) -> Writer:
    from gymnasium.vector.utils import iterate

    return lambda out, value: write(out, list(iterate(space.stacked_feature_space, value)))


def _graph(space: Any, most: int) -> tuple[int, Writer]:
    nodes, write_nodes = _elements(*features_of(space.node_space, most), most, "Graph (nodes)")
    width, write_edge = features_of(space.edge_space, most) if space.edge_space is not None else (0, None)

    def edge(out: np.ndarray, value: Any) -> None:
        features, (start, end) = value
        out[start] = out[most + end] = 1
        if write_edge is not None:
            write_edge(out[2 * most :], features)

    edges, write_edges = _elements(2 * most + width, edge, most, "Graph (edges)")

    def write(out: np.ndarray, value: Any) -> None:
        write_nodes(out[:nodes], value.nodes)
        if value.edge_links is not None:
            features = value.edges if value.edges is not None else [None] * len(value.edge_links)
            write_edges(out[nodes:], list(zip(features, value.edge_links, strict=True)))

    return nodes + edges, write
