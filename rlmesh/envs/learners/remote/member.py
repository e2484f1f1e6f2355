"""The role of remote learners: a copy of each policy in a process of its own."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import gymnasium as gymnasium
import numpy as np
import torch
import torch.distributed as dist

from rlmesh import current_worker, rpc
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.learners.partners import ALONE, LearnerShare, PartnerLost, ProcessPartners
from rlmesh.envs.modules.module_policy import ModulePolicy

__all__ = ["LearnerAnswer", "LearnerMember", "fingerprint", "learner_state", "set_learner_state"]

BEHIND, LOST, DONE = "behind", "lost", "done"


class LearnerAnswer(NamedTuple):
    """The answer of a learner to an update.

    Attributes:
        outcome: ``done``; ``behind``: it has not the weights that the update begins with, and did nothing; ``lost``:
            another learner could not be reached, and the weights are as before.
        text: more about it.
        weights: a checksum of the weights after the update.
        results: of the first learner: statistics by policy id.
        states: of the first learner: see `learner_state`, by policy id.
    """

    outcome: str
    text: str = ""
    weights: int = 0
    results: Mapping[str, Any] | None = None
    states: Mapping[str, Any] | None = None


def learner_state(policy: ModulePolicy) -> dict[str, Any]:
    """Weights, optimizer, and counters of a policy: all that an update changes and depends on."""
    return {"weights": policy.get_weights(), "learner": policy.learner.get_state()}


def set_learner_state(policy: ModulePolicy, state: Mapping[str, Any]) -> None:
    """Take over a state of `learner_state`."""
    policy.set_weights(state["weights"])
    policy.learner.set_state(state["learner"])


def fingerprint(state: Any) -> int:
    """A checksum of nested arrays, tensors and numbers: equal states have equal ones."""
    sum_ = 0
    for leaf in _leaves(state):
        sum_ = zlib.crc32(leaf, sum_)
    return sum_


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for name, each in state.items():
            yield str(name).encode()
            yield from _leaves(each)
    elif isinstance(state, list | tuple):
        for each in state:
            yield from _leaves(each)
    elif isinstance(state, torch.Tensor):
        yield np.ascontiguousarray(state.detach().cpu().numpy()).reshape(-1).view(np.uint8)
    elif isinstance(state, np.ndarray):
        yield np.ascontiguousarray(state).reshape(-1).view(np.uint8)
    else:
        yield repr(state).encode()


class LearnerMember:
    """One of several learners; all of them get each call together, and restart together."""

    def setup(self) -> None:
        import cloudpickle

        worker = current_worker()
        given = cloudpickle.loads(worker.job_info.user_config["learner"])
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // worker.world_size))
        self.partners = ALONE
        if worker.world_size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=given["timeout_s"]))
            self.partners = ProcessPartners()
        self.policies: dict[str, ModulePolicy] = {}
        for policy_id, (policy_class, *arguments) in given["policies"].items():
            policy = self.policies[policy_id] = policy_class(*arguments)
            policy.learner.partners = self.partners
        self.version = -1

    @rpc
    def set_states(self, states: Mapping[str, Any], version: int) -> None:
        """Take over weights and optimizers of all policies, and their number."""
        for policy_id, state in states.items():
            set_learner_state(self.policies[policy_id], state)
        self.version = version

    @rpc
    def update(self, shares: Mapping[str, tuple[Mapping[str, Any], LearnerShare]], version: int) -> LearnerAnswer:
        """Update policies with the rows of this learner, if its weights have this number; then they have the next.

        Raises:
            FloatingPointError: the loss is NaN or infinite; at all learners alike, and the weights are as before.
        """
        if self.version != version:
            return LearnerAnswer(BEHIND, f"has weights {self.version}, not {version}")
        before = {policy_id: learner_state(self.policies[policy_id]) for policy_id in shares} if len(shares) > 1 else {}
        try:
            results = {
                policy_id: self.policies[policy_id].learner.update_share(SampleBatch(rows), LearnerShare(*share))
                for policy_id, (rows, share) in shares.items()
            }
        except PartnerLost as error:
            self.version = -1
            return LearnerAnswer(LOST, str(error))
        except FloatingPointError:
            for policy_id, state in before.items():  # those that were updated before the one that failed
                set_learner_state(self.policies[policy_id], state)
            raise
        except BaseException:
            self.version = -1
            self.partners.leave()  # the others wait for this one's gradients
            raise
        self.version = version + 1
        weights = fingerprint({policy_id: policy.get_weights() for policy_id, policy in self.policies.items()})
        if current_worker().rank:
            return LearnerAnswer(DONE, weights=weights)
        states = {policy_id: learner_state(self.policies[policy_id]) for policy_id in shares}
        return LearnerAnswer(DONE, weights=weights, results=results, states=states)

    @rpc
    def pid(self) -> int:
        """The number of this learner's process."""
        return os.getpid()

    def teardown(self) -> None:
        if hasattr(self, "partners"):
            self.partners.leave()
