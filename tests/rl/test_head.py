from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl.head import chunk_size, chunked_log_probs, entropy, token_log_probs


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    chosen = token_log_probs(logits.unsqueeze(0), tokens.unsqueeze(0), mask, temperature=temperature)
    return chosen[0], entropy(logits.unsqueeze(0), mask, temperature=temperature)[0]


@given(st.integers(1, 9), st.integers(1, 12), st.booleans(), st.sampled_from([0.5, 1.0, 1.7]), st.integers(0, 2**31))
def test_chunks_give_the_values_and_gradients_of_the_plain_head(
    count: int, chunk: int, with_bias: bool, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    hidden, weight = normal(count, 4).requires_grad_(), normal(11, 4).requires_grad_()
    bias = normal(11).requires_grad_() if with_bias else None
    tokens = torch.randint(0, 11, (count,), generator=generator)
    up, up_entropy = normal(count), normal(count)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    chunked = chunked_log_probs(hidden, weight, tokens, bias=bias, temperature=temperature, chunk_tokens=chunk)
    expected = plain(hidden, weight, tokens, bias, temperature)
    for mine, theirs in zip(chunked, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    got = torch.autograd.grad((chunked.log_probs * up + chunked.entropy * up_entropy).sum(), inputs)
    wanted = torch.autograd.grad((expected[0] * up + expected[1] * up_entropy).sum(), inputs)
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9)


def test_a_token_that_was_ruled_out_spoils_neither_entropy_nor_gradients() -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(5, dtype=torch.float64)
    bias[2] = -torch.inf
    terms = chunked_log_probs(hidden, torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 4]), bias=bias)
    (terms.log_probs + terms.entropy).sum().backward()
    assert terms.entropy.isfinite().all()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


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


def test_the_logits_of_one_chunk_fit_into_the_limit() -> None:
    assert chunk_size(152_000, torch.bfloat16, limit_bytes=2**28) == 441
    assert chunk_size(152_000, torch.float64, limit_bytes=2**28) == 220
    assert chunk_size(10**9, torch.float32, limit_bytes=2**20) == 1


def test_wrong_arguments_are_refused() -> None:
    hidden, weight, tokens = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\[tokens, width\]"):
        chunked_log_probs(hidden, torch.zeros(5, 6), tokens)
    with pytest.raises(ValueError, match="temperature"):
        chunked_log_probs(hidden, weight, tokens, temperature=0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        chunked_log_probs(hidden, weight, tokens, chunk_tokens=0)
