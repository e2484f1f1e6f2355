"""The steps that a ``training_step`` is made of: sampling, and one update."""

from __future__ import annotations

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
            its own. Without ``max_env_steps``, one fragment of each runner.
        max_agent_steps: the same, where one agent acts per step.
        concat: False returns a list with one batch per runner and fragment.

    Returns:
        A `MultiAgentBatch`, with the steps of ``default_policy``. The statistics of its episodes are kept by the group.
    """
    if max_env_steps is not None and max_agent_steps is not None:
        raise UsageError("synchronous_parallel_sample: give max_env_steps or max_agent_steps, not both")
    steps = max_env_steps if max_env_steps is not None else max_agent_steps
    batches: list[Any] = []
    if steps is None or worker_set.fragment_length is None:
        batches = worker_set.sample_all(num_steps=steps)
    else:
        while sum(batch.env_steps() for batch in batches) < steps:
            batches += worker_set.sample_all()
    if not concat:
        return [batch.as_multi_agent() for batch in batches]
    return SampleBatch.concat_samples(batches).as_multi_agent()


def train_one_step(algorithm: Algorithm, train_batch: SampleBatch | MultiAgentBatch) -> ResultDict:
    """Update the policies of the local runner with a batch.

    Returns:
        By policy id: ``learner_stats`` and ``num_agent_steps_trained``.
    """
    results = ResultDict(algorithm.learner_group.update(train_batch))
    algorithm.count_trained(train_batch.env_steps(), train_batch.agent_steps())
    return results


def multi_gpu_train_one_step(algorithm: Algorithm, train_batch: SampleBatch | MultiAgentBatch) -> ResultDict:
    """`train_one_step`, under the name that RLlib has for batches that are loaded in minibatches."""
    return train_one_step(algorithm, train_batch)
