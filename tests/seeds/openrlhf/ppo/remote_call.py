"""Document 002, "How the RPC works", step 4, and below it the calls that its diagram names, in the same forms."""

# The documents' code, as it is written there: neither typed nor sorted as ours.
# mypy: ignore-errors
# ruff: noqa
from contextlib import contextmanager
from functools import lru_cache
from typing import List, Sequence

import torch

from rlmesh import Future, RLRoleType, RoleGroup


# remote_call.py
# 1. Simple and Blocking call
def vllm_wakeup() -> None:
    group(RLRoleType.ROLLOUT).call(vllm_wakeup).result()


# 2. Async broadcast call, return Future
def reference_init(strategy, model_path: str) -> Future:
    return group(RLRoleType.REFERENCE).call(reference_init, strategy, model_path)


# 3. Batch call, return FutureSequence(subclass of Sequence)
def vllm_generate(prompt_token_ids: Sequence[List[int]], params: "SamplingParams") -> Sequence["RequestOutput"]:
    return group(RLRoleType.ROLLOUT).call_batch(
        vllm_generate,
        len(prompt_token_ids),
        prompt_token_ids,
        params,
    )


# 4. Call multiple roles in parallel, and wait
def end_job() -> None:
    """End the job by calling the end_job method on the group."""
    futures = [
        group(role).call(end_job)
        for role in [
            RLRoleType.ROLLOUT,
            RLRoleType.REFERENCE,
            RLRoleType.REWARD,
            RLRoleType.ACTOR,
            RLRoleType.CRITIC,
        ]
    ]
    for future in futures:
        future.result()


# 4. Utility to cache RoleGroup
@lru_cache(maxsize=None)
def group(role: RLRoleType) -> RoleGroup:
    """Get the role group for the given role."""
    return RoleGroup(role.name)


# 5. Also, you could add any custom remote_call utilities here
@contextmanager
def vllm_running(enable_sleep: bool):
    """Context manager to handle vLLM sleep and wakeup."""
    if enable_sleep:
        vllm_wakeup()
    try:
        yield
    finally:
        if enable_sleep:
            vllm_sleep()


# The rest of the diagram.
def vllm_sleep() -> None:
    group(RLRoleType.ROLLOUT).call(vllm_sleep).result()


def reward_init(strategy, model_path: str) -> Future:
    return group(RLRoleType.REWARD).call(reward_init, strategy, model_path)


def critic_init(strategy, model_path: str) -> Future:
    return group(RLRoleType.CRITIC).call(critic_init, strategy, model_path)


def actor_init(strategy, model_path: str) -> Future:
    return group(RLRoleType.ACTOR).call(actor_init, strategy, model_path)


def actor_forward(
    sequences: Sequence[torch.Tensor],
    action_mask: Sequence[torch.BoolTensor],
    attention_mask: Sequence[torch.LongTensor],
) -> Sequence[torch.Tensor]:
    return group(RLRoleType.ACTOR).call_batch(actor_forward, len(sequences), sequences, action_mask, attention_mask)


def reference_forward(sequences: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return group(RLRoleType.REFERENCE).call_batch(reference_forward, len(sequences), sequences)


def critic_forward(sequences: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return group(RLRoleType.CRITIC).call_batch(critic_forward, len(sequences), sequences)


def reward_forward(sequences: Sequence[torch.Tensor]) -> Sequence[float]:
    return group(RLRoleType.REWARD).call_batch(reward_forward, len(sequences), sequences)


def actor_append_experience(experiences: Sequence[dict]) -> Future:
    return group(RLRoleType.ACTOR).call(actor_append_experience, experiences)


def critic_append_experience(experiences: Sequence[dict]) -> Future:
    return group(RLRoleType.CRITIC).call(critic_append_experience, experiences)


def critic_update() -> Future:
    return group(RLRoleType.CRITIC).call(critic_update)


def actor_update() -> Future:
    return group(RLRoleType.ACTOR).call(actor_update)


def broadcast_to_vllm(version: int) -> None:
    group(RLRoleType.ACTOR).call(broadcast_to_vllm, version).result()


def weight_sync(version: int) -> None:
    group(RLRoleType.ROLLOUT).call(weight_sync, version).result()


def save_checkpoint(tag: str) -> List[Future]:
    return [group(role).call(save_checkpoint, tag) for role in [RLRoleType.CRITIC, RLRoleType.ACTOR]]
