"""`RayPPOTrainer`: a PPO training, described by roles, workers and pools of devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmesh import RLJobBuilder, RoleGroup, rpc
from rlmesh.errors import UsageError
from rlmesh.rl.algorithms.protocol import Algorithm
from rlmesh.rl.rewards.model import RewardModel
from rlmesh.rl.rewards.scoring import Rewards
from rlmesh.rl.trainers.run import Run, result_of
from rlmesh.rl.trainers.trainer import Trainer
from rlmesh.rl.verl.config import MEGATRON, read, run_settings_of
from rlmesh.rl.verl.role import Role
from rlmesh.rl.verl.workers import ActorRolloutRefWorker, NVMegatronRayWorkerGroup, RayWorkerGroup

if TYPE_CHECKING:
    from rlmesh import DLJob, JobHandle, ResourcePoolManager

__all__ = ["RayPPOTrainer"]

FIT_WAIT_S = 24 * 3600.0
"""Seconds after `RayPPOTrainer.init_workers` within which `RayPPOTrainer.fit` must be called."""
INIT_WAIT_S = 1800.0
"""Seconds that all models together may take to load."""
BEGUN = "fit-begun"
POLICY = {
    "Actor": ("Actor", "Rollout"), "ActorRollout": ("ActorRollout",), "ActorRolloutRef": ("ActorRolloutRef",),
}  # fmt: skip
OWN_NAMES = {
    "Actor": "ACTOR", "ActorRollout": "ACTOR", "ActorRolloutRef": "ACTOR", "Rollout": "ROLLOUT", "Critic": "CRITIC",
    "RefPolicy": "REFERENCE", "RewardModel": "REWARD",
}  # fmt: skip
"""verl's role → the role of the job."""


@dataclass(frozen=True)
class VerlRun(Run):
    """The settings of a `RayPPOTrainer`.

    Attributes:
        manager: scores the responses in training, unless a reward model does; ``None``: ``rewards`` score them.
        validation_manager: scores the responses in validation: a `Rewards`, or a value for ``Run.rewards``; ``None``:
            they are scored as in training.
    """

    manager: Any = None
    validation_manager: Any = None


class WaitingTrainer(Trainer):
    """A trainer that begins when `RayPPOTrainer.fit` is called."""

    def setup(self) -> None:
        self._begun = threading.Event()
        super().setup()
        run = self.settings
        assert isinstance(run, VerlRun)
        if run.manager is not None and not run.reward_models:
            self.rewards = run.manager
        self.validation_rewards = self.rewards
        if isinstance(run.validation_manager, Rewards):
            self.validation_rewards = run.validation_manager
        elif run.validation_manager is not None:
            made = replace(run, rewards=run.validation_manager, validation_manager=None)
            self.validation_rewards = Rewards(
                made.scored, self.tokenizer, workers=run.reward_workers, prompt_key=run.prompt_key
            )

    @rpc
    def initialise(self) -> None:
        """Return when all models are loaded."""
        for role in (self.actor, self.engines, self.reference, self.critic):
            if role:
                role.call("shares_devices").result()

    @rpc
    def let_begin(self) -> None:
        """Let the training begin."""
        (self.run_dir / BEGUN).touch()
        self._begun.set()

    def run(self) -> None:
        # `let_begin` is not called again after a restart of this process.
        if not (self.run_dir / BEGUN).exists() and not self._begun.wait(FIT_WAIT_S):
            raise UsageError(f"fit() was not called within {FIT_WAIT_S:g} s after init_workers()")
        super().run()


class RayPPOTrainer:
    """Trains by PPO or one of its relatives, on roles, workers and pools that the caller names.

    Args:
        config: a configuration with verl's keys: objects with attributes, mappings or OmegaConf's containers. The log
            names the keys that change nothing here.
        tokenizer: of the model, to count prompts. The roles load their own from the model's folder.
        role_worker_mapping: the worker class of each role.
        resource_pool_manager: the pools of devices, and the pool of each role. Roles of one pool take turns on its
            devices; on CPUs (``trainer.device="cpu"``) a device is a place without a GPU.
        ray_worker_group_cls: `RayWorkerGroup`.
        reward_fn: a `RewardManager`, a reward function, or a list of rewards (`rlmesh.rl.rewards`).
        val_reward_fn: the same for validation; by default ``reward_fn``.

    Raises:
        NotImplementedError: the strategy or the advantage estimator does not exist here; the message names it. Or
            ``ray_worker_group_cls`` is the one for Megatron-LM.
        UsageError: lists the other faults.
    """

    def __init__(
        self, config: Any, tokenizer: Any, role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: ResourcePoolManager, ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        reward_fn: Any = None, val_reward_fn: Any = None,
    ) -> None:  # fmt: skip
        if issubclass(ray_worker_group_cls, NVMegatronRayWorkerGroup):
            raise NotImplementedError(f"{ray_worker_group_cls.__name__}: {MEGATRON}")
        self.config, self.tokenizer = config, tokenizer
        self.workers, self.pools = dict(role_worker_mapping), resource_pool_manager
        self._handle: JobHandle | None = None
        if faults := [*self._role_faults()]:
            raise UsageError("RayPPOTrainer: " + "\n  ".join(faults))
        self.run = self._make_run(reward_fn, val_reward_fn)

    def init_workers(self) -> None:
        """Check the settings, start the job, and wait until all models are loaded.

        Raises:
            UsageError: lists the faults of the settings; no process was started.
            JobFailed: a worker failed; the error names the cause.
        """
        if self._handle is not None:
            raise UsageError("init_workers() was called before")
        self.run.check()
        self._handle = self.job().start(str(read(self.config, "trainer.experiment_name", "ppo")))
        self._call("initialise")

    def fit(self) -> dict[str, float]:
        """Train, and return the metrics of the last report.

        Raises:
            JobFailed: the training failed; the error names the cause.
        """
        if self._handle is None:
            raise UsageError("fit(): call init_workers() first")
        self._call("let_begin")
        result = self._handle.result()
        return dict(result_of(Path(result.run_dir)).metrics)

    def job(self) -> DLJob:
        """The job: one role for each of verl's, on its pool, and the trainer."""
        builder = RLJobBuilder().config(self.run).node_num(self.run.nodes)
        sizes = self.pools.resource_pool_spec.values()
        per_node = max(sum(own[node] for own in sizes if node < len(own)) for node in range(max(map(len, sizes))))
        builder = builder.device_type("GPU" if self.run.devices_per_node else "CPU").device_per_node(per_node)
        builder.trainer(WaitingTrainer).resource(cpu=1)
        for role, worker in self.workers.items():
            made = worker.parts[role.name] if _has_parts(worker) else worker
            part = builder.role(OWN_NAMES.get(role.name, role.name.upper()))
            (part.train if role.name in ("Actor", "ActorRollout", "ActorRolloutRef", "Critic") else part.run)(made)
        builder.with_pools(
            self.pools.resource_pool_spec,
            {OWN_NAMES.get(role.name, role.name.upper()): pool for role, pool in self.pools.mapping.items()},
        )
        return builder.build()

    def _call(self, method: str) -> None:
        assert self._handle is not None
        with self._handle.join(timeout_s=INIT_WAIT_S) as runtime:
            RoleGroup("TRAINER", runtime=runtime).options(timeout_s=INIT_WAIT_S).call(method).result()

    def _role_faults(self) -> Iterator[str]:
        names = {role.name for role in self.workers}
        policies = [policy for policy, parts in POLICY.items() if names.issuperset(parts)]
        if not policies:
            yield "role_worker_mapping needs Role.ActorRollout, or Role.ActorRolloutRef, or Role.Actor and Role.Rollout"
        elif len(policies) > 1 or (policies != ["Actor"] and names & {"Actor", "Rollout"}):
            given = sorted(names & {"Actor", "Rollout", "ActorRollout", "ActorRolloutRef"})
            yield f"role_worker_mapping has the policy more than once: {', '.join(given)}"
        if {"ActorRolloutRef", "RefPolicy"} <= names:
            yield "role_worker_mapping has the reference twice: ActorRolloutRef and RefPolicy"
        for role in self.workers:
            if role not in self.pools.mapping:
                yield f"resource_pool_manager has no pool for {role}"
            worker = self.workers[role]
            if _has_parts(worker) and role.name not in worker.parts:
                yield f"{worker.__name__} cannot be {role}: it has {', '.join(worker.parts)}"
        if read(self.config, "reward_model.enable") and "RewardModel" not in names:
            yield "reward_model.enable: role_worker_mapping has no Role.RewardModel"
        elif read(self.config, "reward_model.enable") and read(self.config, "reward_model.model.path") is None:
            yield "reward_model.model.path is missing"
        elif "RewardModel" in names and not read(self.config, "reward_model.enable"):
            yield "role_worker_mapping has Role.RewardModel, but reward_model.enable is not set"

    def _lacking(self, algorithm: Algorithm) -> Iterator[str]:
        """One sentence per role that the algorithm needs and the mapping lacks."""
        names, estimator = {role.name for role in self.workers}, read(self.config, "algorithm.adv_estimator", "gae")
        if "critic" in algorithm.needs and "Critic" not in names:
            yield (
                f"algorithm.adv_estimator={estimator!r} needs a critic: add Role.Critic to role_worker_mapping and to "
                "the pools, or choose 'grpo'"
            )
        if "reference" in algorithm.needs and not names & {"RefPolicy", "ActorRolloutRef"}:
            yield (
                "the KL divergence needs a reference: add Role.RefPolicy to role_worker_mapping and to the pools, or "
                "set the coefficient to 0"
            )

    def _make_run(self, reward_fn: Any, val_reward_fn: Any) -> VerlRun:
        sizes = {role.name: sum(self.pools.get_resource_pool(role)) for role in self.workers}
        policy = next(name for name in POLICY if name in sizes)
        settings = run_settings_of(self.config, self.tokenizer)
        if lacking := [*self._lacking(settings["algorithm"])]:
            raise UsageError("RayPPOTrainer: " + "\n  ".join(lacking))
        rewards: Any = list(reward_fn.rewards.values()) if isinstance(reward_fn, Rewards) else reward_fn
        if read(self.config, "reward_model.enable"):
            path = read(self.config, "reward_model.model.path")
            rewards = [RewardModel(path, members=sizes["RewardModel"])]
        elif rewards is None:
            raise UsageError("RayPPOTrainer: give reward_fn, or reward_model.enable with Role.RewardModel")
        return VerlRun(
            **{
                **settings,
                "actor": replace(settings["actor"], ranks=sizes[policy]),
                "critic": replace(settings["critic"], ranks=sizes.get("Critic", 1)),
                "rollout": replace(settings["rollout"], engines=sizes.get("Rollout", sizes[policy])),
            },
            rewards=rewards,
            manager=reward_fn if isinstance(reward_fn, Rewards) else None,
            validation_manager=val_reward_fn if val_reward_fn is not None else reward_fn,
        )


def _has_parts(worker: Any) -> bool:
    return isinstance(worker, type) and issubclass(worker, ActorRolloutRefWorker)
