"""The sampling distribution, its kept mass and penalties agree with NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.rl import reference
from rlmesh.rl.engines.rollout import SamplingParams
from rlmesh.rl.engines.sampling import kept_mass, log_distribution, penalised

truncations = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.2, 3),
        "top_k": st.integers(0, 9),
        "top_p": st.floats(0.05, 1),
        "min_p": st.just(0.0) | st.floats(0.01, 0.9),
    }
)


@given(st.integers(0, 2**31), truncations)
def test_truncated_distributions_agree_with_numpy(seed: int, options: dict[str, Any]) -> None:
    logits = np.random.default_rng(seed).normal(size=(3, 7)) * 2
    params = SamplingParams(1, **options)
    log_probs = log_distribution(torch.tensor(logits), params)
    masses = kept_mass(torch.tensor(logits), log_probs, params)
    for row in range(3):
        np.testing.assert_allclose(log_probs[row], reference.log_distribution(logits[row], **options), atol=1e-9)
        np.testing.assert_allclose(masses[row], reference.kept_mass(logits[row], **options), atol=1e-9)


@given(
    st.integers(0, 2**31),
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(st.integers(0, 5), max_size=6),
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties_agree_with_numpy(
    seed: int, prompt: list[int], response: list[int], repetition: float, presence: float, frequency: float
) -> None:
    logits = np.random.default_rng(seed).normal(size=6)
    counts = torch.bincount(torch.tensor(response, dtype=torch.long), minlength=6).unsqueeze(0)
    seen = torch.bincount(torch.tensor(prompt + response, dtype=torch.long), minlength=6).unsqueeze(0) > 0
    params = SamplingParams(1, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    found = penalised(torch.tensor(logits).unsqueeze(0), params, seen=seen, counts=counts)
    wanted = reference.penalised(
        logits, prompt, response, repetition=repetition, presence=presence, frequency=frequency
    )
    np.testing.assert_allclose(found[0], wanted, atol=1e-12)


def test_seeded_parameters_are_those_of_replace() -> None:
    params = SamplingParams(3, temperature=0.5, top_k=4, stop_token_ids=(7,), stop=("end",), seed=1)
    assert params.seeded(9) == replace(params, seed=9) and params.seed == 1
    with pytest.raises(TypeError):
        params.seeded(1.5)  # type: ignore[arg-type]
