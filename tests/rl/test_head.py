from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl.head import TILE_BYTES, chunked_log_probs, entropy, log_probs, tile_columns, token_log_probs


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    chosen = token_log_probs(logits.unsqueeze(0), tokens.unsqueeze(0), mask, temperature=temperature)
    return chosen[0], entropy(logits.unsqueeze(0), mask, temperature=temperature)[0]


UPS = st.sampled_from([(True, True), (True, False), (False, True)])


@given(
    st.integers(1, 9), st.integers(1, 12), st.integers(1, 13), st.booleans(), st.sampled_from([0.5, 1.0, 1.7]), UPS,
    st.integers(0, 2**31),
)  # fmt: skip
def test_tiles_give_the_values_and_gradients_of_the_plain_head(
    count: int, chunk: int, columns: int, with_bias: bool, temperature: float, used: tuple[bool, bool], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    hidden, weight = normal(count, 4).requires_grad_(), normal(11, 4).requires_grad_()
    bias = normal(11).requires_grad_() if with_bias else None
    tokens = torch.randint(0, 11, (count,), generator=generator)
    up_log_probs, up_entropy = normal(count), normal(count)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    with mock.patch.object(log_probs, "tile_columns", lambda *_: columns):
        chunked = chunked_log_probs(hidden, weight, tokens, bias=bias, temperature=temperature, chunk_tokens=chunk)
        terms = [term * up for term, up, use in zip(chunked, (up_log_probs, up_entropy), used, strict=True) if use]
        got = torch.autograd.grad([term.sum() for term in terms], inputs)
    expected = plain(hidden, weight, tokens, bias, temperature)
    for mine, theirs in zip(chunked, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    whole = [term * up for term, up, use in zip(expected, (up_log_probs, up_entropy), used, strict=True) if use]
    wanted = torch.autograd.grad([term.sum() for term in whole], inputs)
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_a_token_that_was_ruled_out_spoils_neither_entropy_nor_gradients(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    bias = torch.zeros(5, dtype=torch.float64)
    bias[2:4] = -torch.inf
    tokens = torch.tensor([0, 1, 4])
    with mock.patch.object(log_probs, "tile_columns", lambda *_: columns):
        terms = chunked_log_probs(hidden, weight, tokens, bias=bias)
        got = torch.autograd.grad((terms.log_probs + terms.entropy).sum(), hidden)
    kept = torch.tensor([0, 1, 4])
    expected = plain(hidden, weight[kept], torch.arange(3), None, 1.0)
    torch.testing.assert_close(tuple(terms), expected)
    torch.testing.assert_close(got, torch.autograd.grad([term.sum() for term in expected], hidden))


def test_under_autocast_both_passes_compute_in_its_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(30, 8, generator=generator)
    hidden.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        terms = chunked_log_probs(hidden, weight, torch.arange(6))
    (got,) = torch.autograd.grad(terms.log_probs.sum(), hidden)
    narrow = hidden.detach().bfloat16().requires_grad_()
    same = chunked_log_probs(narrow, weight.bfloat16(), torch.arange(6))
    torch.testing.assert_close(tuple(terms), tuple(same), atol=0, rtol=0)
    torch.testing.assert_close(got.bfloat16(), *torch.autograd.grad(same.log_probs.sum(), narrow), atol=0, rtol=0)


def test_half_precision_is_reduced_in_single() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(30, 8, generator=generator).bfloat16().requires_grad_()
    tokens = torch.arange(6)
    terms = chunked_log_probs(hidden, weight, tokens, chunk_tokens=2)
    assert terms.log_probs.dtype == terms.entropy.dtype == torch.float32
    expected = (hidden @ weight.T).float().log_softmax(-1)[torch.arange(6), tokens]
    torch.testing.assert_close(terms.log_probs, expected)
    terms.log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_no_tokens_give_no_terms_and_zero_gradients() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    terms = chunked_log_probs(torch.zeros(0, 4), weight, torch.zeros(0, dtype=torch.long))
    assert terms.log_probs.shape == terms.entropy.shape == (0,)
    (terms.log_probs.sum() + terms.entropy.sum()).backward()
    assert weight.grad is not None and (weight.grad == 0).all()


def test_the_logits_of_one_tile_fit_into_the_limit() -> None:
    assert tile_columns(1024, 152_000, torch.bfloat16, "cpu") == TILE_BYTES["cpu"] // (1024 * 4)
    assert tile_columns(1024, 152_000, torch.float64, "cpu") == TILE_BYTES["cpu"] // (1024 * 8)
    assert tile_columns(1 << 20, 152_000, torch.float32, "cpu") == 256
    assert tile_columns(1, 50, torch.float32, "cuda") == 50


def test_wrong_arguments_are_refused() -> None:
    hidden, weight, tokens = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\[tokens, width\]"):
        chunked_log_probs(hidden, torch.zeros(5, 6), tokens)
    with pytest.raises(ValueError, match="temperature"):
        chunked_log_probs(hidden, weight, tokens, temperature=0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        chunked_log_probs(hidden, weight, tokens, chunk_tokens=0)
