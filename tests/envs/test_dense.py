"""`rlmesh.envs.modules.dense`: stacks of layers as one node have the results of the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmesh.envs import ActorCriticModule
from rlmesh.envs.learners.policy_gradient import PPOLearner
from rlmesh.envs.modules import activations, dense
from rlmesh.envs.modules.dense import through
from rlmesh.envs.modules.encoders import Features, mlp

BOX, TWO = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)


@pytest.fixture(autouse=True)
def numpys_tanh_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The layers themselves compute tanh by NumPy too, for tensors of any size: results are equal to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(activations, "SMALLEST", 0)
    monkeypatch.setattr(activations, "SMALLEST_WITH_GRADIENT", 0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of linear layers of the stacks that were computed as one."""
    found: list[int] = []
    real = dense._outputs

    def outputs(x: torch.Tensor, steps: Any, parameters: Any) -> list[torch.Tensor]:
        found.append(len(steps))
        return real(x, steps, parameters)

    monkeypatch.setattr(dense, "_outputs", outputs)
    return found


def networks(activation: str, width: int = 64) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(Features(BOX), *mlp([4, width, width], activation))
    return [encoder, mlp([width, 2], activation, last_gain=1.0)]


def in_turn(x: torch.Tensor, given: list[torch.nn.Module]) -> torch.Tensor:
    for network in given:
        x = network(x)
    return x


def parameters(given: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return [p for network in given for p in network.parameters()]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 7, 128, 800])
@pytest.mark.parametrize("obs_needs_gradient", [False, True])
def test_values_and_gradients_are_those_of_the_layers(
    nodes: list[int], activation: str, rows: int, obs_needs_gradient: bool
) -> None:
    given = networks(activation)
    x, weights = torch.randn(rows, 4).requires_grad_(obs_needs_gradient), torch.randn(rows, 2)
    asked = [*([x] if obs_needs_gradient else []), *parameters(given)]
    one, other = through(x, *given), in_turn(x, given)
    assert nodes == [3] and torch.equal(one, other)
    assert type(one.grad_fn).__name__ == "_DenseBackward"
    for mine, right in zip(
        torch.autograd.grad(one, asked, weights), torch.autograd.grad(other, asked, weights), strict=True
    ):
        assert torch.equal(mine, right)
    with torch.no_grad():
        assert torch.equal(through(x, *given), other)
    with torch.inference_mode():
        assert torch.equal(through(x, *given), other)
    assert nodes == [3, 3, 3]


@pytest.mark.parametrize("frozen", [{0}, {0, 1}, {1, 2, 5}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}])
def test_frozen_parameters_get_no_gradients(nodes: list[int], frozen: set[int]) -> None:
    given = networks("tanh")
    for i, p in enumerate(parameters(given)):
        p.requires_grad_(i not in frozen)
    asked = [p for p in parameters(given) if p.requires_grad]
    x = torch.randn(9, 4)
    y = through(x, *given)
    assert nodes == [3] and y.requires_grad is bool(asked)
    if asked:
        right = torch.autograd.grad(in_turn(x, given).sum(), asked)
        assert all(map(torch.equal, torch.autograd.grad(y.sum(), asked), right))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_gradients_can_be_differentiated(nodes: list[int], activation: str) -> None:
    given = networks(activation, 8)
    first = torch.randn(5, 4)

    def second(pass_: Any) -> list[torch.Tensor]:
        x = first * parameters(given)[0].mean()  # the input depends on a parameter
        wanted = parameters(given)
        found = torch.autograd.grad(pass_(x).square().sum(), wanted, create_graph=True)
        total = sum(each.square().sum() for each in found)
        assert isinstance(total, torch.Tensor)
        return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))

    mine, right = second(lambda x: through(x, *given)), second(lambda x: in_turn(x, given))
    assert nodes and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(mine, right, strict=True))


def test_networks_that_somebody_changed_are_called_as_they_are(nodes: list[int]) -> None:
    class Halved(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) / 2

    seen: list[Any] = []
    x = torch.randn(6, 4)
    hooked = networks("tanh")
    hooked[0][1].register_forward_hook(lambda *given: seen.append(given))  # type: ignore[index]
    backwards = networks("tanh")
    backwards[1].register_full_backward_hook(lambda *given: seen.append(given))
    sub = [*networks("tanh"), Halved(2, 2)]
    without_bias = [torch.nn.Linear(4, 4, bias=False), *networks("tanh")]
    normed = [*networks("tanh"), torch.nn.LayerNorm(2)]
    weighted = [networks("tanh")[0], torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 2))]
    for given in (hooked, backwards, sub, without_bias, normed, weighted):
        y = through(x, *given)
        assert torch.equal(y, in_turn(x, given))
        y.sum().backward()
    assert len(seen) == 3 and not nodes


def test_inputs_and_modes_that_are_left_to_the_layers(nodes: list[int]) -> None:
    given = networks("tanh")
    x = torch.randn(300, 4)
    for other in (x[0], x.reshape(3, 100, 4), x[:0]):
        assert torch.equal(through(other, *given), in_turn(other, given))
    with torch.autocast("cpu", torch.bfloat16):
        assert through(x, *given).dtype is torch.bfloat16
    weights = {f"{i}.{n}": p.detach() for i, net in enumerate(given) for n, p in net.named_parameters()}
    stack = torch.nn.ModuleList(given)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return through(obs, *self.stack)

    held = {f"stack.{name}": value for name, value in weights.items()}
    per_row = torch.func.vmap(
        torch.func.grad(lambda w, row: torch.func.functional_call(Whole(), w, (row[None],)).sum()), (None, 0)
    )(held, x)
    right = torch.autograd.grad(in_turn(x, given).sum(), parameters(given))
    for mine, whole in zip(per_row.values(), right, strict=True):
        assert torch.allclose(mine.sum(0), whole, rtol=1e-3, atol=1e-4)
    exported = torch.export.export(Whole(), (x,))
    assert torch.allclose(exported.module()(x), in_turn(x, given), atol=1e-5)
    assert not nodes


def ppo_batch(rows: int) -> Any:
    from rlmesh.envs.batches.sample_batch import SampleBatch

    rng = np.random.default_rng(1)
    return SampleBatch(
        obs=rng.standard_normal((rows, 4), np.float32), actions=rng.integers(0, 2, rows),
        action_logp=np.full(rows, -0.69, np.float32), action_dist_inputs=np.zeros((rows, 2), np.float32),
        advantages=rng.standard_normal(rows, np.float32), value_targets=rng.standard_normal(rows, np.float32),
    )  # fmt: skip


def test_the_weights_after_updates_are_those_of_the_layers(nodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "clip_param": 0.2, "entropy_coeff": 0.01, "kl_coeff": 0.2, "kl_target": 0.01, "vf_clip_param": 10.0,
        "vf_loss_coeff": 0.5, "standardize_advantages": True, "num_epochs": 3, "minibatch_size": 64, "seed": 1,
    }  # fmt: skip

    def weights() -> list[torch.Tensor]:
        torch.manual_seed(3)
        learner = PPOLearner(ActorCriticModule(BOX, TWO), settings)
        for _ in range(3):
            learner.update(ppo_batch(500))
        return [p.detach().clone() for p in learner.module.parameters()]

    found = weights()
    assert len(nodes) == 2 * 3 * 3 * 8
    monkeypatch.setattr(dense, "_steps", lambda x, layers: None)
    assert all(map(torch.equal, found, weights())) and len(nodes) == 2 * 3 * 3 * 8
