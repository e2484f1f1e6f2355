"""`rlmesh.envs.modules.activations`: the values and the gradients of tanh by NumPy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rlmesh.envs.modules import activations
from rlmesh.envs.modules.activations import Tanh, tanh
from rlmesh.envs.modules.encoders import mlp
from rlmesh.envs.modules.numpy_forward import NumpyForward

ULP = 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With many threads, torch's own is taken."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tensors that NumPy computed."""
    sizes: list[int] = []
    real = activations._values

    def values(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return real(x)

    monkeypatch.setattr(activations, "_values", values)
    return sizes


def numbers(*shape: int) -> torch.Tensor:
    """Numbers of all sizes from 1e-6 to 1e3, of both signs."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (torch.rand(shape, generator=generator) * 9 - 6)
    return sizes * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def ulps(found: torch.Tensor, x: torch.Tensor) -> float:
    """The largest error, in units of the last place of the right value."""
    right = np.tanh(x.double().numpy())
    return float((np.abs(found.double().numpy() - right) / np.spacing(np.abs(right).astype(np.float32))).max())


@pytest.mark.parametrize("gradients", [False, True])
def test_values_are_right_to_two_units_of_the_last_place(by_numpy: list[int], gradients: bool) -> None:
    x = numbers(500, 64).requires_grad_(gradients)
    found = tanh(x)
    assert by_numpy == [x.numel()] and found.requires_grad is gradients
    assert ulps(found.detach(), x.detach()) <= ULP


def test_special_values_are_those_of_torch_without_a_warning(by_numpy: list[int]) -> None:
    special = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-40, -1e-45, 0.0, -0.0, 9.0]
    x = torch.tensor(special * 500)
    found, right = tanh(x), torch.tanh(x)
    assert by_numpy and torch.equal(found.nan_to_num(7), right.nan_to_num(7))
    assert torch.equal(found.signbit()[1:10], right.signbit()[1:10])


def test_the_values_of_a_row_do_not_depend_on_the_others(by_numpy: list[int]) -> None:
    x = numbers(1000, 67)
    whole = tanh(x)
    for rows in (slice(0, 40), slice(7, 300), slice(1, 1000, 3)):
        assert torch.equal(tanh(x[rows]), whole[rows])
    assert len(by_numpy) == 4


@pytest.mark.parametrize("form", ["plain", "transposed", "every second", "expanded"])
def test_tensors_of_any_strides(by_numpy: list[int], form: str) -> None:
    base = numbers(256, 128).clamp(-3, 3)
    forms = {
        "plain": base, "transposed": base.T, "every second": base[:, ::2], "expanded": base[:1].expand(256, 128),
    }  # fmt: skip
    x = forms[form].detach().requires_grad_()
    found, weights = tanh(x), numbers(*x.shape).clamp(-1, 1)
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    assert by_numpy and torch.allclose(found, torch.tanh(x), rtol=1e-6, atol=0)
    assert torch.allclose(gradient, weights * (1 - found.detach().square()), rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_torch_for_the_same_values(by_numpy: list[int]) -> None:
    x, weights = numbers(200, 64).requires_grad_(), numbers(200, 64)
    y = tanh(x)
    (found,) = torch.autograd.grad(y, x, weights)
    assert by_numpy and torch.equal(found, torch.ops.aten.tanh_backward(weights, y.detach()))


def test_it_can_be_differentiated_twice(by_numpy: list[int]) -> None:
    def second(function: object) -> torch.Tensor:
        x = (torch.arange(12_800.0).reshape(200, 64) % 100 / 25 - 2).requires_grad_()
        assert callable(function)
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    found = second(tanh)
    assert by_numpy and torch.allclose(found, second(torch.tanh), rtol=1e-4, atol=1e-5)


def test_a_result_that_is_changed_in_place_is_refused_by_the_backward_pass(by_numpy: list[int]) -> None:
    y = tanh(numbers(200, 64).requires_grad_())
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_other_tensors_are_left_to_torch(by_numpy: list[int]) -> None:
    large = numbers(200, 64)
    others = [
        large.double(), large.bfloat16(), torch.zeros(0, 64), torch.tensor(0.5), numbers(10, 10), large.to("meta"),
    ]  # fmt: skip
    for x in others:
        found = tanh(x)
        assert found.dtype == x.dtype and found.shape == x.shape
        assert x.is_meta or torch.equal(found, torch.tanh(x))
    assert torch.autograd.gradcheck(tanh, numbers(5, 3).double().clamp(-2, 2).requires_grad_())
    torch.set_num_threads(activations.MOST_THREADS + 1)
    tanh(large)
    assert not by_numpy


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use
def test_transformations_of_functions_are_left_to_torch(by_numpy: list[int]) -> None:
    x = numbers(200, 64).clamp(-3, 3)
    assert torch.allclose(torch.func.grad(lambda x: tanh(x).sum())(x), 1 - torch.tanh(x).square(), atol=1e-6)
    assert torch.equal(torch.func.vmap(tanh)(x), torch.tanh(x))
    value, tangent, *_ = torch.func.jvp(tanh, (x,), (torch.ones_like(x),))
    assert torch.equal(value, torch.tanh(x)) and torch.allclose(tangent, 1 - value.square(), atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(tanh(dual)).tangent is not None
    assert not by_numpy


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_network_is_traced_scripted_and_exported_as_with_torch(by_numpy: list[int]) -> None:
    network, x = mlp([64, 64, 2], "tanh", last_gain=1.0), numbers(300, 64)
    traced = torch.jit.trace(network, x, check_trace=False)
    scripted = torch.jit.script(network)
    exported = torch.export.export(network, (x,))
    assert any("tanh" in str(node.target) for node in exported.graph.nodes)
    assert not by_numpy
    with torch.no_grad():
        right = network(x)
        for form in (traced, scripted, exported.module()):
            assert torch.allclose(form(x), right, atol=1e-5)


def test_networks_keep_their_names_and_can_be_copied_and_pickled(by_numpy: list[int]) -> None:
    network = mlp([4, 64, 64, 2], "tanh", last_gain=1.0)
    plain = torch.nn.Sequential(*(torch.nn.Tanh() if isinstance(each, Tanh) else each for each in network))
    assert list(network.state_dict()) == list(plain.state_dict())
    assert all(isinstance(each, torch.nn.Tanh) for each in list(network)[1::2])
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    x = numbers(300, 4)
    right = network(x)
    for same in (copy.deepcopy(network), pickle.loads(pickle.dumps(network)), torch.load(file, weights_only=False)):
        assert torch.equal(same(x), right)
    assert torch.allclose(plain(x), right, atol=1e-5)


def test_a_runner_has_the_values_of_the_learner() -> None:
    network, x = mlp([4, 64, 64, 2], "tanh", last_gain=1.0), numbers(300, 4).clamp(-5, 5)
    runner = NumpyForward.of(network)
    assert runner is not None
    assert np.allclose(runner(x.numpy()), network(x).detach().numpy(), atol=1e-5)
