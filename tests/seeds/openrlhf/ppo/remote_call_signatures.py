"""Document 002, "How the RPC works", step 1: remote methods are declared as plain functions."""

# The documents' code, as it is written there: neither typed nor sorted as ours.
# mypy: ignore-errors
# ruff: noqa
from typing import List, Sequence

import torch

from rlmesh import FutureSequence


# remote_call.py
def vllm_wakeup() -> None: ...


def vllm_generate(
    prompt_token_ids: Sequence[List[int]], params: "SamplingParams"
) -> FutureSequence["RequestOutput"]: ...


def actor_forward(
    sequences: Sequence[torch.Tensor],
    action_mask: Sequence[torch.BoolTensor],
    attention_mask: Sequence[torch.LongTensor],
) -> Sequence[torch.Tensor]: ...
