"""`run_here`: a run in this process, without a job: the trainer calls the methods of the roles directly.

Breakpoints work in all of it, and an error has the traceback of the role that raised it. One process trains, samples
and holds the reference (`ActorRolloutRef`). The results are those of a job with one rank and one engine.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlmesh import (
    Alarm,
    JobInfo,
    MetricRecord,
    RestartEvent,
    StopRequest,
    Trackers,
    WorkerContext,
    acting_as,
    private_files,
)
from rlmesh.rl.rewards.model import RewardModel
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.fused import ActorRollout, ActorRolloutRef
from rlmesh.rl.roles.reference import ReferenceRole
from rlmesh.rl.roles.reward import RewardRole
from rlmesh.rl.trainers.job import offline_roles
from rlmesh.rl.trainers.run import result_of
from rlmesh.rl.trainers.trainer import Trainer

if TYPE_CHECKING:
    from rlmesh.rl.trainers.run import Run, RunResult

__all__ = ["NO_MEMBERS", "MetricsLink", "RoleHere", "one_rank_each", "roles_here", "run_here"]

logger = logging.getLogger(__name__)


def run_here(run: Run, run_dir: Path, name: str) -> RunResult:
    """Carry out a run in this process; see `Run.here`."""
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        private_files.make_private(run_dir.resolve())
    private_files.make_folder(run_dir)
    with Trackers(run.trackers).following(run_dir, name) if run.trackers else nullcontext():
        return _run_followed(run, run_dir)


def _run_followed(run: Run, run_dir: Path) -> RunResult:
    needs, responses = run.algorithm.needs, run.algorithm.responses
    trainer, actor = offline_roles(responses)
    if responses == "sampled":
        kinds: dict[str, type[Any]] = {"ACTOR": ActorRolloutRef if "reference" in needs else ActorRollout}
    else:
        kinds = {"ACTOR": actor or ActorRole} | ({"REFERENCE": ReferenceRole} if "reference" in needs else {})
    if "critic" in needs and responses != "ranked":
        kinds["CRITIC"] = CriticRole
    kinds |= {one.role: RewardRole for one in run.scored if isinstance(one, RewardModel)}
    link = MetricsLink(run_dir)
    job = JobInfo("here", "here", one_rank_each(run), "GPU" if torch.cuda.is_available() else "CPU")

    def context(role: str) -> WorkerContext:
        return WorkerContext(job, role, 0, 1, link, run_dir=run_dir.absolute())

    with roles_here(kinds, context) as groups:
        driver = RoleHere(context("TRAINER"), lambda: trainer_here(trainer or Trainer, groups))
        driver.invoke("setup")
        try:
            driver.invoke("run")
        finally:
            driver.invoke("teardown")
    return result_of(run_dir)


def one_rank_each(run: Run) -> Run:
    """The settings of a run for one rank of each role."""
    return replace(
        run, actor=replace(run.actor, ranks=1), critic=replace(run.critic, ranks=1),
        rollout=replace(run.rollout, engines=1), placement="separate",  # roles in one process need no device lease
    )  # fmt: skip


@contextmanager
def roles_here(
    kinds: Mapping[str, Callable[[], Any]], context: Callable[[str], WorkerContext]
) -> Iterator[dict[str, RoleHere]]:
    """Roles in this process: set up in order, and ended in reverse order at the end of the block.

    Args:
        kinds: makes the object of each role, by the role's name.
        context: makes the context of a role.
    """
    collects_at = gc.get_threshold()
    with one_rank():
        roles: dict[str, RoleHere] = {}
        try:
            for role, kind in kinds.items():
                roles[role] = RoleHere(context(role), kind)
                roles[role].invoke("setup")
            yield roles
        finally:
            for one in reversed(roles.values()):
                one.invoke("teardown")
            gc.unfreeze()  # objects that the roles made may be garbage now
            gc.set_threshold(*collects_at)


def trainer_here(kind: type[Trainer], groups: dict[str, RoleHere]) -> Trainer:
    """Make a trainer whose roles are in its own process.

    Args:
        kind: class of the trainer.
        groups: the roles by name.
    """

    class TrainerHere(kind):  # type: ignore[misc, valid-type]
        """A trainer that finds roles in this process."""

        def group(self, role: str) -> Any:
            return groups.get(role) or NO_MEMBERS

    made: Trainer = TrainerHere()
    return made


class RoleHere:
    """The only member of a role, in this process, with the methods of `RoleGroup` that trainers use.

    Args:
        context: context of the member.
        kind: makes the member's object.
    """

    def __init__(self, context: WorkerContext, kind: Callable[[], Any]) -> None:
        self._context = context
        with acting_as(context):
            self._object = kind()

    def __len__(self) -> int:
        return 1

    ranks = (0,)

    @property
    def object(self) -> Any:
        """The member's object."""
        return self._object

    def __getitem__(self, place: int) -> _MemberHere:
        return _MemberHere(self)

    def options(self, **options: Any) -> RoleHere:
        """The same member: calls in one process need no options."""
        return self

    def invoke(self, method: str, *args: Any) -> Any:
        """The result of a method of the member; ``None`` if it has no such method."""
        function = getattr(self._object, method, None)
        if function is None:
            return None
        with acting_as(self._context):
            return function(*args)

    def call(self, method: str, *args: Any, _scatter: bool = False) -> Future[list[Any]]:
        """The results of all members."""
        return _done([self.invoke(method, *([arg[0] for arg in args] if _scatter else args))])

    def call_batch(self, method: str, count: int, *args: Any) -> list[Any]:
        """One result per item."""
        found: list[Any] = self.invoke(method, *args)
        return found


class _MemberHere:
    """The handle of the only member of a role."""

    def __init__(self, role: RoleHere) -> None:
        self._role = role

    def call(self, method: str, *args: Any) -> Future[Any]:
        """The result of a method."""
        future: Future[Any] = Future()
        future.set_result(self._role.invoke(method, *args))
        return future


class _NoMembers:
    """A role that the run lacks."""

    def __len__(self) -> int:
        return 0

    def options(self, **options: Any) -> _NoMembers:
        return self


NO_MEMBERS = _NoMembers()


class MetricsLink:
    """Stands for the connection to a job: writes reports to ``metrics.jsonl``, as a job does."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "metrics.jsonl"
        self._sender, self._count = f"here/{secrets.token_hex(4)}", 0
        """Tells the reports of this run from those of an earlier one that it goes on from."""

    def report(self, record: MetricRecord) -> None:
        self._count += 1
        line = {
            "at": record.at, "role": record.role, "rank": record.rank, "step": record.step,
            "metrics": dict(record.metrics), "sender": self._sender, "number": self._count,
        }  # fmt: skip
        with os.fdopen(private_files.append_to(self._file), "ab") as file:
            private_files.cut_torn_line(file.fileno())
            file.write(json.dumps(line).encode() + b"\n")
        logger.info("step %d: %s", record.step, dict(record.metrics))

    def alarm(self, alarm: Alarm) -> None:
        logger.warning("%s", alarm)

    def boundary(self, step: int) -> StopRequest | None:
        return None

    def stopping(self, step: int) -> None:
        pass

    def take_events(self, wait_s: float) -> tuple[RestartEvent, ...]:
        time.sleep(wait_s)
        return ()

    def listen(self, listener: Callable[[RestartEvent], object]) -> None:
        pass

    def tell_listeners(self) -> None:
        pass

    def take_call_stats(self) -> tuple[Any, ...]:
        return ()


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, unless there is one already."""
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _done(value: list[Any]) -> Future[list[Any]]:
    future: Future[list[Any]] = Future()
    future.set_result(value)
    return future
