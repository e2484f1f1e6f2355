"""Values arrive as they were, owned by the receiver."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh.errors import PayloadTooLarge, Unserializable
from rlmesh.wire import codec
from rlmesh.wire.envelope import Buffer


@dataclass
class Sample:
    tokens: list[int]
    logprobs: torch.Tensor


def there_and_back(value: object) -> object:
    return codec.decode([bytes(frame) for frame in codec.encode(value)])


@pytest.mark.parametrize("value", [None, 1, 2.5, "text", b"bytes", [1, [2]], {"a": (1, 2)}, {3}])
def test_plain_values_come_back_equal(value: object) -> None:
    assert there_and_back(value) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.zeros(0, 3),
        torch.tensor(3.5),
        torch.randn(100, 100).t(),
        torch.ones(5000, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3000, 2)[::2],
    ],
    ids=["small", "zero-size", "scalar", "transposed", "bfloat16", "bool", "strided"],
)
def test_tensors_come_back_equal_and_writable(tensor: torch.Tensor) -> None:
    back = there_and_back(tensor)
    assert isinstance(back, torch.Tensor)
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)
    back.fill_(0)  # The receiver owns it.


def test_a_parameter_stays_a_parameter_and_a_graph_stays_behind() -> None:
    parameter = torch.nn.Parameter(torch.ones(2000, 3))
    back = there_and_back({"leaf": parameter, "result": parameter * 2})
    assert isinstance(back, dict)
    assert isinstance(back["leaf"], torch.nn.Parameter) and back["leaf"].requires_grad
    assert not back["result"].requires_grad and torch.equal(back["result"], torch.full((2000, 3), 2.0))


def test_arrays_are_writable_and_captured() -> None:
    array = np.arange(100_000, dtype=np.float32)
    frames = codec.encode(array)
    array[:] = -1
    back = codec.decode(frames)
    assert np.array_equal(back, np.arange(100_000, dtype=np.float32))
    back[0] = 5


def test_big_buffers_travel_in_frames_of_their_own_and_small_ones_do_not() -> None:
    assert len(codec.encode(np.zeros(10_000))) == 2
    assert len(codec.encode(np.zeros(10))) == 1
    assert codec.size_bytes(codec.encode(np.zeros(10_000))) > 80_000


def test_nested_containers_and_dataclasses_come_back_with_what_they_share() -> None:
    sample = Sample([1, 2], torch.randn(2000))
    back = there_and_back([sample, sample])
    assert isinstance(back, list)
    assert back[0].tokens == [1, 2] and torch.equal(back[1].logprobs, sample.logprobs)
    assert back[0] is back[1]


def test_local_functions_and_classes_travel_by_value() -> None:
    offset = 10

    class Adder:
        def add(self, x: int) -> int:
            return x + offset

    function = there_and_back(lambda x: x + offset)
    assert callable(function) and function(1) == 11
    back = there_and_back(Adder())
    assert back.add(2) == 12  # type: ignore[attr-defined]


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(Unserializable, match="lock"):
        codec.encode({"lock": threading.Lock()})


@pytest.mark.parametrize(
    "value",
    [
        ((1, "a", None, 2.5, True, b"x"), {}),
        ((), {}),
        ((1,), {"key": 2}),
        ((np.arange(3),), {}),
        ((1, [2, 3]), {}),
        (1, np.arange(3)),
        (np.arange(3), {}),
        "x" * 200_000,
        (("y" * 200_000,), {}),
        2**100,
    ],
)
def test_the_quick_way_gives_the_same(value: Any) -> None:
    given = codec.decode(codec.encode(value))
    assert repr(given) == repr(value)


def test_the_quick_way_has_the_same_cap() -> None:
    def refuse(buffers: Sequence[memoryview], rest_bytes: int) -> Sequence[Buffer]:
        raise PayloadTooLarge(f"{rest_bytes} bytes")

    with pytest.raises(PayloadTooLarge, match="2000"):
        codec.encode((("x" * 200_000,), {}), refuse)
