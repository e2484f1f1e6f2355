"""The kernels of the head beside its plain code, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlmesh.rl.head import chunked_log_probs, log_probs, tile_columns

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ROWS, WIDTH, VOCABULARY = 700, 64, 50_001


def terms(dtype: torch.dtype, *, temperature: float, bias: bool, which: str, ruled_out: bool) -> list[Tensor]:
    """Log-probabilities, entropies and the gradients of a random function of them."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, device="cuda") / 4).to(dtype).requires_grad_()
    own = torch.randn(VOCABULARY, device="cuda", dtype=dtype)
    if ruled_out:
        own[1000:30_000] = -torch.inf  # whole tiles without a possible token
    own.requires_grad_()
    tokens = torch.randint(0, 1000, (ROWS,), device="cuda")
    tokens[::3] = VOCABULARY - 1
    found = chunked_log_probs(
        hidden, weight, tokens, bias=own if bias else None, temperature=temperature, chunk_tokens=300
    )
    share = torch.randn(2, ROWS, device="cuda")
    total = (share[0] * found.log_probs).sum() if which != "entropy" else torch.zeros((), device="cuda")
    total = total + (share[1] * found.entropy).sum() if which != "log_probs" else total
    total.backward()
    grads = [x.grad.float() for x in (hidden, weight, own) if x.grad is not None]
    return [found.log_probs.detach(), found.entropy.detach(), *grads]


@pytest.mark.parametrize("which", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize(
    ("temperature", "bias", "ruled_out"), [(1.0, False, False), (0.7, True, False), (1.0, True, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_give_the_values_and_gradients_of_the_plain_code(
    dtype: torch.dtype, temperature: float, bias: bool, ruled_out: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tile_columns(300, VOCABULARY, torch.float32, "cuda") == VOCABULARY
    monkeypatch.setitem(log_probs.TILE_BYTES, "cuda", 300 * 7001 * 4)  # several tiles, the last one not full
    used = log_probs._kernels()
    assert used is not None, "Triton is installed"
    ours = terms(dtype, temperature=temperature, bias=bias, which=which, ruled_out=ruled_out)
    monkeypatch.setattr(log_probs, "_kernels", lambda: None)
    plain = terms(dtype, temperature=temperature, bias=bias, which=which, ruled_out=ruled_out)
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        scale = other.abs().max()
        # The last bit of a gradient in half precision may differ: the plain code rounds the same sum.
        assert (one - other).abs().max() <= (2e-5 if dtype == torch.float32 else 1e-2) * scale
    # Values are float32 in every dtype.
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-5, atol=2e-4)
