"""The steps that a ``training_step`` is made of: sampling, and one update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlmesh.envs.algorithms.results import ResultDict
from rlmesh.envs.batches.multi_agent_batch import MultiAgentBatch
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.errors import UsageError

if TYPE_CHECKING:
    from rlmesh.envs.algorithms.algorithm import Algorithm
    from rlmesh.envs.runners.env_runner_group import EnvRunnerGroup

__all__ = ["multi_gpu_train_one_step", "synchronous_parallel_sample", "train_one_step"]


def synchronous_parallel_sample(
    *, worker_set: EnvRunnerGroup, max_env_steps: int | None = None, max_agent_steps: int | None = None,
    concat: bool = True,
) -> Any:  # fmt: skip
    """Let all runners of a group sample at the same time, and wait for all of them.

    Args:
        worker_set: the group. Its remote runners sample, or, if there are none, its local one.
        max_env_steps: steps of environments in total, rounded up so that each environment makes the same number; if
            the group was given a ``rollout_fragment_length``, to whole fragments of it, each of which has returns of
            its own. Without ``max_env_steps``, one fragment of each runner. Steps that only reset an environment count,
            and are no rows of the batch.
        max_agent_steps: steps of agents in total, at least; with one agent, the same as ``max_env_steps``. Of several
            agents, samples follow each other until there are so many.
        concat: False returns a list with one batch per runner and fragment.

    Returns:
        A `MultiAgentBatch`; with one agent, its policy is ``default_policy``. The group keeps the statistics of its
        episodes.
    """
    if max_env_steps is not None and max_agent_steps is not None:
        raise UsageError("synchronous_parallel_sample: give max_env_steps or max_agent_steps, not both")
    wanted = max_env_steps if max_env_steps is not None else max_agent_steps
    batches: list[Any] = []
    if max_env_steps is not None and (steps := worker_set.steps_of_a_round) is not None:
        # Steps that only reset an environment, or broke it, are no rows: they must not cost a whole round more.
        for _ in range(math.ceil(max_env_steps / steps)):
            batches += worker_set.sample_all()
    elif wanted is not None and (worker_set.fragment_length is not None or max_agent_steps is not None):
        of_agents = max_agent_steps is not None
        while (missing := wanted - sum(b.agent_steps() if of_agents else b.env_steps() for b in batches)) > 0:
            batches += worker_set.sample_all(num_steps=_next_steps(worker_set, batches, missing))
    else:
        batches = worker_set.sample_all(num_steps=wanted)
    if not concat:
        return [batch.as_multi_agent() for batch in batches]
    return SampleBatch.concat_samples(batches).as_multi_agent()


def _next_steps(worker_set: EnvRunnerGroup, batches: list[Any], missing: int) -> int | None:
    """Steps of environments to sample next; None: one fragment of each runner."""
    if worker_set.fragment_length is not None:
        return None
    agent_steps = sum(batch.agent_steps() for batch in batches)
    env_steps = sum(batch.env_steps() for batch in batches)
    return max(1, math.ceil(missing / (agent_steps / env_steps if agent_steps else worker_set.agents_at_once)))


def train_one_step(algorithm: Algorithm, train_batch: SampleBatch | MultiAgentBatch) -> ResultDict:
    """Update the policies of the local runner with a batch.

    Returns:
        By id of the policies that learn: ``learner_stats`` and ``num_agent_steps_trained``.
    """
    results = ResultDict(algorithm.learner_group.update(train_batch))
    if algorithm.learns_from_rewards:
        for policy_id in results:
            algorithm.signal.add(policy_id, train_batch.as_multi_agent().policy_batches[policy_id])
    algorithm.count_trained(train_batch.env_steps(), sum(each["num_agent_steps_trained"] for each in results.values()))
    return results


def multi_gpu_train_one_step(algorithm: Algorithm, train_batch: SampleBatch | MultiAgentBatch) -> ResultDict:
    """`train_one_step`, under the name that RLlib has for batches that are loaded in minibatches."""
    return train_one_step(algorithm, train_batch)
