from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.distillation import sampled_reverse_kl_advantages, top_k_kl
from tests.rl.batches import Batch, batches, poisoned


def log_probs_of(batch: Batch, stream: int, k: int) -> np.ndarray:
    """Log-probabilities of k tokens out of k + 2, so that some mass is left."""
    logits = batch.normal(stream, k + 2)
    log_probs: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_probs[..., :k]


@given(batches(), st.integers(1, 4), st.sampled_from(["forward", "reverse"]), st.booleans())
def test_divergences_agree_with_numpy(
    batch: Batch, k: int, direction: Literal["forward", "reverse"], tail: bool
) -> None:
    student, teacher = log_probs_of(batch, 1, k), log_probs_of(batch, 2, k)
    got = top_k_kl(
        torch.tensor(poisoned(student, batch.mask)),
        torch.tensor(poisoned(teacher, batch.mask)),
        torch.tensor(batch.mask),
        direction,
        tail=tail,
    )
    expected = reference.top_k_kl(student, teacher, batch.mask, direction, tail=tail)
    np.testing.assert_allclose(got, expected, atol=1e-9)
    if tail:
        assert (got >= -1e-12).all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient(
    direction: Literal["forward", "reverse"],
) -> None:
    logits = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    student = logits.log_softmax(-1)[..., :4]
    loss = top_k_kl(student, student.detach(), torch.ones(2, 3), direction)
    np.testing.assert_allclose(loss.detach(), 0, atol=1e-12)
    loss.sum().backward()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad, 0, atol=1e-12)


def test_all_of_the_mass_in_the_top_k_is_no_infinity() -> None:
    student = torch.tensor([[[0.5, 0.5]]]).log().requires_grad_()
    loss = top_k_kl(student, torch.tensor([[[0.9, 0.1]]]).log(), torch.ones(1, 1), "forward")
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.9 * np.log(1.8) + 0.1 * np.log(0.2), abs=1e-5)
    assert student.grad is not None and student.grad.isfinite().all()


@given(batches())
def test_the_policy_gradient_form_agrees_with_numpy(batch: Batch) -> None:
    student, teacher = batch.normal(1), batch.normal(2)
    got = sampled_reverse_kl_advantages(
        torch.tensor(poisoned(student, batch.mask)),
        torch.tensor(poisoned(teacher, batch.mask)),
        torch.tensor(batch.mask),
    )
    np.testing.assert_allclose(got, reference.sampled_reverse_kl_advantages(student, teacher, batch.mask), atol=1e-12)


def test_the_mean_gradient_of_the_policy_form_is_that_of_the_divergence() -> None:
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    exact = torch.autograd.grad((logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - teacher)).sum(), logits)[0]
    student = logits.log_softmax(-1)
    advantages = sampled_reverse_kl_advantages(student.unsqueeze(0), teacher.unsqueeze(0), torch.ones(1, 5))[0]
    mean = torch.autograd.grad(-(student.exp().detach() * advantages * student).sum(), logits)[0]
    torch.testing.assert_close(mean, exact)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="forward, reverse"):
        top_k_kl(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.ones(1, 1), "sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[batch, time, k\]"):
        top_k_kl(torch.zeros(1, 1, 2), torch.zeros(1, 1, 3), torch.ones(1, 1), "forward")
