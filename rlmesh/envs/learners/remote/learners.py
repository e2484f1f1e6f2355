"""`RemoteLearners`: the job of the learners, and the driver's side of their updates."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh import DLJobBuilder, JobHandle, RoleGroup, Runtime
from rlmesh.envs.batches.sample_batch import SampleBatch
from rlmesh.envs.learners.remote.member import (
    DONE,
    LOST,
    LearnerAnswer,
    LearnerMember,
    fingerprint,
    learner_state,
    set_learner_state,
)
from rlmesh.envs.modules.module_policy import ModulePolicy
from rlmesh.envs.runners.jobs import end_with_the_program, outside_of_loops
from rlmesh.errors import RLMeshError, UsageError

__all__ = ["RemoteLearners", "shares_of"]

logger = logging.getLogger(__name__)

ROLE = "LEARNER"
TIMEOUT_S = 600.0
AGAIN_S = 0.1
_numbers = itertools.count(1)


class RemoteLearners:
    """``number`` learners with equal weights; each update is that of one learner with the whole batch.

    The policies of this process are the state of the last update: weights, optimizer and counters arrive with its
    results. Learners that restart, or that the policies of this process have left behind, get this state first. So an
    update is applied once, or not at all.

    Args:
        policies: by id.
        number: number of learners.
        timeout_s: longest wait for an update, restarts of learners included; None: 600 seconds, since learners wait for
            each other, and one that is gone must not stop the others for good.
        max_restarts: restarts of the learners within ten minutes.
        run_dir: folder of the job; None: a new one under ``runs``.

    Raises:
        UsageError: a policy is no `ModulePolicy`, whose learner takes shares of a batch.
        LaunchError: the job could not be started.
    """

    def __init__(
        self, policies: Mapping[str, Any], number: int, *, timeout_s: float | None = 600.0, max_restarts: int = 3,
        run_dir: str | None = None,
    ) -> None:  # fmt: skip
        for policy_id, policy in policies.items():
            if not isinstance(policy, ModulePolicy) or not policy.learner.shares_batches():
                kind = type(policy.learner).__name__ if isinstance(policy, ModulePolicy) else type(policy).__name__
                raise UsageError(
                    f"num_learners={number}: policy {policy_id!r} learns by {kind}, which takes whole batches; set "
                    "num_learners=0"
                )
        self.policies: dict[str, ModulePolicy] = dict(policies)
        self.number, self.timeout_s = number, TIMEOUT_S if timeout_s is None else timeout_s
        self.version = 0
        self._known: int | None = None
        self._failure: BaseException | None = None
        self._stack: list[Any] = []
        try:
            outside_of_loops(lambda: self._start(max_restarts, run_dir))
        except BaseException:
            self.stop()
            raise

    def _start(self, max_restarts: int, run_dir: str | None) -> None:
        import cloudpickle

        policies = {
            policy_id: (type(policy), policy.observation_space, policy.action_space, policy.config)
            for policy_id, policy in self.policies.items()
        }
        given = cloudpickle.dumps({"policies": policies, "timeout_s": self.timeout_s})
        role = DLJobBuilder().skip_node_check().config({"learner": given}).role(ROLE).train(LearnerMember)
        job = role.nnodes(1).nproc_per_node(self.number).restart(
            "role", max_restarts=max_restarts, delay_s=0.05, max_delay_s=1.0
        ).build()  # fmt: skip
        handle: JobHandle = job.start(f"learners-{next(_numbers)}", view="none", run_dir=run_dir)
        self._stack.append(handle.__enter__())
        end_with_the_program(handle)
        joined = handle.join()
        runtime: Runtime = joined.__enter__()
        self._stack.append(joined)
        self._group: RoleGroup[LearnerMember] = RoleGroup(ROLE, runtime=runtime)

    def update(self, parts: Mapping[str, SampleBatch]) -> dict[str, Any]:
        """Update policies, by id, with their batches; returns statistics by policy id.

        Raises:
            UsageError: a batch is empty or lacks a column, or the learners have been stopped.
            FloatingPointError: the loss is NaN or infinite; the weights are those from before.
            RLMeshError: learners ended more often than they may, or a learner raised. The policies of this process have
                the weights of the last whole update; the learners cannot be used any more.
        """
        if self._failure is not None:
            raise UsageError(f"the learners have ended: {self._failure}") from self._failure
        for policy_id, batch in parts.items():
            self.policies[policy_id].learner.check(batch)
        shares = self._shares(parts)
        if fingerprint(self._states()) != self._known:  # somebody set weights or state here
            self.version += 1
            self._known = None
        try:
            answers = self._answers(shares)
        except FloatingPointError:
            raise
        except (RLMeshError, RuntimeError) as error:
            self._fail(error)
            raise
        first = answers[0]
        assert first.states is not None
        assert first.results is not None
        if len({answer.weights for answer in answers}) > 1:
            self._fail(RuntimeError("the learners have different weights after an update"))
            assert self._failure is not None
            raise self._failure
        for policy_id, state in first.states.items():
            set_learner_state(self.policies[policy_id], state)
        self.version += 1
        self._known = fingerprint(self._states())
        return dict(first.results)

    def _answers(self, shares: list[dict[str, Any]]) -> list[LearnerAnswer]:
        """The answers to an update that all learners have done; those that restarted get their state before."""
        ends = time.monotonic() + self.timeout_s
        calls = self._group.options(timeout_s=self.timeout_s, idempotent=True)
        if self._known is None:
            calls.call("set_states", self._states(), self.version).result()
        while True:
            answers: list[LearnerAnswer] = calls.options(scatter=True).call("update", shares, self.version).result()
            if all(answer.outcome == DONE for answer in answers):
                return answers
            if time.monotonic() > ends:
                text = next(answer.text for answer in answers if answer.outcome != DONE)
                raise RLMeshError(f"the learners did not come back within {self.timeout_s:g} s: {text}")
            if any(answer.outcome == LOST for answer in answers):
                time.sleep(AGAIN_S)  # until those that remain are restarted too
            else:
                calls.call("set_states", self._states(), self.version).result()

    def _states(self) -> dict[str, Any]:
        return {policy_id: learner_state(policy) for policy_id, policy in self.policies.items()}

    def _shares(self, parts: Mapping[str, SampleBatch]) -> list[dict[str, Any]]:
        """For each learner: its rows, the columns that are needed, and their place, by policy id."""
        shares: list[dict[str, Any]] = [{} for _ in range(self.number)]
        for policy_id, batch in parts.items():
            learner = self.policies[policy_id].learner
            bounds = shares_of(len(batch), learner.edges(batch), self.number)
            for share, (rows, place) in zip(shares, learner.shares(batch, bounds), strict=True):
                share[policy_id] = (dict(rows), place)
        return shares

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.stop()

    def stop(self) -> None:
        """End the job; a second call does nothing."""
        stack, self._stack = self._stack, []
        if self._failure is None:
            self._failure = UsageError("they were stopped")
        while stack:
            leave = stack.pop().__exit__
            try:
                outside_of_loops(lambda leave=leave: leave(None, None, None))  # type: ignore[misc]
            except RLMeshError as error:
                logger.debug("the job of the learners ended by itself: %s", error)


def shares_of(rows: int, edges: np.ndarray, number: int) -> list[int]:
    """The bounds of ``number`` shares of about the same size, each at one of the edges; shares may be empty."""
    wanted = [rows * i // number for i in range(1, number)]
    places = np.concatenate([edges, [rows]])
    nearest = [int(places[np.abs(places - each).argmin()]) for each in wanted]
    return [0, *nearest, rows]
