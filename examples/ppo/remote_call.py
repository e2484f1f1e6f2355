"""All calls between the roles.

Each function is both the name of a remote method and the way to call it: a role binds its method with
``@rpc(remote_call.reward_forward)``, and callers use ``remote_call.reward_forward(…)`` as a plain function. Functions
that start work on other processes return a ``Future`` or ``FutureSequence`` at once, so that several calls can run at
the same time; the user of the result waits.

Calls to :func:`again` are repeated if the member's process is replaced: the same arguments give the same answer. Calls
to actor and critic are not repeated: one rank alone cannot make a collective step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rlmesh import Future, FutureSequence, RLRoleType, RoleGroup, WeightSync

if TYPE_CHECKING:
    from torch import Tensor

    from rlmesh.rl import Sample, SamplingParams

    from .common import Batch, Experience


@cache
def group(role: RLRoleType) -> RoleGroup:
    """The group of a role."""
    return RoleGroup(role.name)


def again(role: RLRoleType) -> RoleGroup:
    """The group of a role, for calls that may be repeated."""
    return group(role).options(idempotent=True)


def _forward(role: RLRoleType, function: Callable[..., Any], batch: Batch) -> FutureSequence[Tensor]:
    """A batch call with the rows of ``batch``: one row of results for each."""
    rows, ranks = len(batch.sequences), len(group(role))
    if rows < ranks:  # a batch call leaves out members without items, but a forward pass of FSDP needs all ranks
        raise ValueError(f"{rows} rows are too few for the {ranks} ranks of {role.name}")
    members = again(role) if role is RLRoleType.REFERENCE else group(role)
    return members.call_batch(function, batch.sequences, batch.attention_mask, batch.action_mask)


# Rollout engines


def rollout_init(model_path: str) -> Future[list[None]]:
    return group(RLRoleType.ROLLOUT).call(rollout_init, model_path)


def rollout_generate(prompt_token_ids: Sequence[list[int]], params: SamplingParams) -> FutureSequence[Sample]:
    """One sample per prompt; the prompts are distributed over the engines."""
    return again(RLRoleType.ROLLOUT).call_batch(rollout_generate, prompt_token_ids, params)


@cache
def weight_sync() -> WeightSync:
    """The weight sync from the actor's ranks to the engines."""
    return WeightSync(group(RLRoleType.ACTOR), group(RLRoleType.ROLLOUT))


# Reward


def reward_init(model_path: str) -> Future[list[None]]:
    return group(RLRoleType.REWARD).call(reward_init, model_path)


def reward_forward(token_ids: Sequence[list[int]], answers: Sequence[str]) -> FutureSequence[float]:
    """One score per response."""
    return again(RLRoleType.REWARD).call_batch(reward_forward, token_ids, answers)


# Reference policy


def reference_init(model_path: str) -> Future[list[None]]:
    return group(RLRoleType.REFERENCE).call(reference_init, model_path)


def reference_forward(batch: Batch) -> FutureSequence[Tensor]:
    """Log-probabilities of each response's tokens under the reference."""
    return _forward(RLRoleType.REFERENCE, reference_forward, batch)


# Actor


def actor_init(model_path: str) -> Future[list[None]]:
    return group(RLRoleType.ACTOR).call(actor_init, model_path)


def actor_forward(batch: Batch) -> FutureSequence[Tensor]:
    """Log-probabilities of each response's tokens under the actor; every rank computes a share."""
    return _forward(RLRoleType.ACTOR, actor_forward, batch)


def actor_update() -> Future[list[dict[str, float]]]:
    """Train on the appended experience; the statistics are equal on every rank."""
    return group(RLRoleType.ACTOR).call(actor_update)


# Critic


def critic_init(model_path: str) -> Future[list[None]]:
    return group(RLRoleType.CRITIC).call(critic_init, model_path)


def critic_forward(batch: Batch) -> FutureSequence[Tensor]:
    """Values before each of a response's tokens."""
    return _forward(RLRoleType.CRITIC, critic_forward, batch)


def critic_update() -> Future[list[dict[str, float]]]:
    return group(RLRoleType.CRITIC).call(critic_update)


# Several roles at once


def append_experience(experience: Experience) -> None:
    """Send the experience to actor and critic, to each rank its share."""
    futures = [
        group(role).options(scatter=True).call(append_experience, experience.split(len(group(role))))
        for role in [RLRoleType.ACTOR, RLRoleType.CRITIC]
    ]
    for future in futures:
        future.result()


def save_checkpoint(directory: str, step: int) -> None:
    """The actor and the critic write their state to ``directory``."""
    futures = [group(role).call(save_checkpoint, directory, step) for role in [RLRoleType.ACTOR, RLRoleType.CRITIC]]
    for future in futures:
        future.result()


def restore(directory: str) -> None:
    """The actor and the critic load the state that they wrote to ``directory``."""
    futures = [group(role).call(restore, directory) for role in [RLRoleType.ACTOR, RLRoleType.CRITIC]]
    for future in futures:
        future.result()


def end_job(with_reference: bool) -> None:
    """Tell every role that the job ends; a job without KL penalty has no reference."""
    futures = [
        group(role).call(end_job)
        for role in [
            RLRoleType.ROLLOUT,
            *([RLRoleType.REFERENCE] if with_reference else []),
            RLRoleType.REWARD,
            RLRoleType.ACTOR,
            RLRoleType.CRITIC,
        ]
    ]
    for future in futures:
        future.result()
