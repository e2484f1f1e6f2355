"""The calls between the roles that are this example's own; those of the training are in the classes of rlmesh.

Each function is both the name of a remote method and the way to call it: a role binds its method with
``@rpc(remote_call.reward_forward)``, and callers use ``remote_call.reward_forward(…)`` as a plain function. If a
member's process is replaced, the call is made again: the same arguments give the same answer.
"""

from collections.abc import Sequence
from functools import cache

from rlmesh import FutureSequence, RLRoleType, RoleGroup
from rlmesh.rl import Sample, SamplingParams


@cache
def group(role: RLRoleType) -> RoleGroup:
    """The group of a role."""
    return RoleGroup(role.name).options(idempotent=True)


def vllm_generate(prompt_token_ids: Sequence[list[int]], params: SamplingParams) -> FutureSequence[Sample]:
    """One sample per prompt; the prompts are distributed over the engines."""
    return group(RLRoleType.ROLLOUT).call_batch(vllm_generate, prompt_token_ids, params)


def reward_forward(texts: Sequence[str], ended: Sequence[bool], truths: Sequence[str]) -> FutureSequence[float]:
    """One score per response."""
    return group(RLRoleType.REWARD).call_batch(reward_forward, texts, ended, truths)
