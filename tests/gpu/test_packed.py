"""Packed forward passes on a GPU: torch's variable-length attention, in the dtype of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlmesh.rl.engines.training.liger import use_liger_layers
from rlmesh.rl.engines.training.packed import PackedInputs, packed_log_probs, prepare
from rlmesh.rl.packing import pack
from tests.rl.episodes import VOCABULARY, episodes_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DRAWN = episodes_of([(30, [200, 0, 75, 12]), (90, [50, 311, 3]), (5, [1]), (1, [64, 64])], 11)


def build(dtype: torch.dtype) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model: torch.nn.Module = Qwen2ForCausalLM(config)
    return model.to("cuda", dtype)


def row_by_row(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens of the policy, episode by episode, and the gradient of their mean."""
    model.zero_grad()
    found = []
    for episode in DRAWN.episodes:
        ids = torch.from_numpy(episode.ids).long().unsqueeze(0).cuda()
        log_probs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        chosen = log_probs.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1)
        found.append(chosen[torch.from_numpy(episode.mask[1:]).cuda()])
    every = torch.cat(found)
    every.mean().backward()
    return every.detach(), model.get_input_embeddings().weight.grad.float()


def packed(model: Any, **cut: Any) -> tuple[torch.Tensor, torch.Tensor]:
    prepare(model)
    model.zero_grad()
    found: dict[tuple[int, int], torch.Tensor] = {}
    count = sum(episode.response_tokens for episode in DRAWN.episodes)
    for one in pack(DRAWN.episodes, groups=DRAWN.groups, **cut).by_rank[0]:
        log_probs = packed_log_probs(model, PackedInputs(one, "cuda"), chunk_tokens=100).log_probs
        (log_probs.sum() / count).backward()
        found.update(zip(zip(one.rows.tolist(), one.places.tolist(), strict=True), log_probs.detach(), strict=True))
    return torch.stack([found[key] for key in sorted(found)]), model.get_input_embeddings().weight.grad.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "cut", [{"token_budget": 4096}, {"token_budget": 400}, {"token_budget": 400, "share_prompts": False}]
)
def test_packs_are_as_exact_as_rows_alone(dtype: torch.dtype, cut: dict[str, Any]) -> None:
    exact, exact_gradient = row_by_row(build(torch.float32))
    alone, alone_gradient = row_by_row(build(dtype))
    got, gradient = packed(build(dtype), **cut)
    spread, gradient_spread = (alone - exact).abs(), (alone_gradient - exact_gradient).norm()
    assert (got - exact).abs().max() <= 2 * spread.max() and (got - exact).abs().mean() <= 2 * spread.mean()
    assert (gradient - exact_gradient).norm() <= 2 * gradient_spread
    print(f"{torch.cuda.get_device_name()}, {dtype}, {cut}: {(got - exact).abs().max():.3g}, alone {spread.max():.3g}")


def test_full_precision_has_no_kernel_and_is_exact() -> None:
    exact, exact_gradient = row_by_row(build(torch.float32))
    got, gradient = packed(build(torch.float32), token_budget=400)
    assert (got - exact).abs().max() <= 1e-4
    assert (gradient - exact_gradient).norm() <= 1e-4 * exact_gradient.norm()


def test_float32_weights_under_autocast_are_as_exact_as_rows_alone() -> None:
    exact, _ = row_by_row(build(torch.float32))
    with torch.autocast("cuda", torch.bfloat16):
        alone, _ = row_by_row(build(torch.float32))
        got, _ = packed(build(torch.float32), token_budget=400)
    assert (got - exact).abs().max() <= 2 * (alone - exact).abs().max()


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_of_liger_are_as_exact_as_rows_alone(autocast: bool) -> None:
    pytest.importorskip("liger_kernel")
    exact, exact_gradient = row_by_row(build(torch.float32))
    dtype = torch.float32 if autocast else torch.bfloat16
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        alone, alone_gradient = row_by_row(build(dtype))
        model = build(dtype)
        assert use_liger_layers(model, True) and "Liger" in type(model.model.norm).__name__ + str(
            model.model.norm.forward
        )
        got, gradient = packed(model, token_budget=400)
    spread = (alone - exact).abs()
    assert (got - exact).abs().max() <= 2 * spread.max() and (got - exact).abs().mean() <= 2 * spread.mean()
    assert (gradient - exact_gradient).norm() <= 2 * (alone_gradient - exact_gradient).norm()
