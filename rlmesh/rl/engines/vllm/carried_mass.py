"""`carry_mass`: lets vLLM report how much probability min-p, top-k and top-p keep.

vLLM gives log-probabilities either before all processing or after it. A trainer needs the log-probabilities after the
temperature and before truncation, together with those of the sampling distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WHOLE", "carry_mass"]

WHOLE = -1
"""The token id of the log-probability that is added."""
EPSILON = 1e-5
"""Below this temperature, vLLM samples greedily."""


def carry_mass(sampler: Any) -> bool:
    """Change a vLLM sampler: for requests with ``logprobs=1`` the second log-probability, of token `WHOLE`, is that of
    the sampled token in the whole vocabulary: after penalties and temperature, before min-p, top-k and top-p.

    Returns:
        False if this kind of sampler is not known here.
    """
    try:
        from vllm.v1.sample.sampler import Sampler
    except ImportError:
        return False
    if type(sampler) is not Sampler:
        return False
    import torch

    sample, gather = sampler.sample, sampler.gather_logprobs
    held: list[Tensor] = []

    def sample_and_hold(logits: Tensor, metadata: Any, *args: Any, **options: Any) -> Any:
        held.clear()
        whole = None
        if metadata.max_num_logprobs and metadata.temperature is not None:
            temperature = torch.where(metadata.temperature < EPSILON, 1.0, metadata.temperature)
            whole = (logits / temperature.unsqueeze(1)).log_softmax(-1, dtype=torch.float32)
        sampled, processed = sample(logits, metadata, *args, **options)
        if whole is not None:
            held.append(whole.gather(-1, sampled.long().view(-1, 1)))
        return sampled, processed

    def gather_and_add(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        found = gather(logprobs, num_logprobs, token_ids)
        if held and num_logprobs:
            found.logprob_token_ids[:, 1] = WHOLE
            found.logprobs[:, 1] = held.pop()[:, 0]
        return found

    sampler.sample, sampler.gather_logprobs = sample_and_hold, gather_and_add
    return True
