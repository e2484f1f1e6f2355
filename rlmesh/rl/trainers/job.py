"""The job of a run: its roles, and the devices of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlmesh import RLJobBuilder

if TYPE_CHECKING:
    from rlmesh import DLJob
    from rlmesh.rl.trainers.run import Run

__all__ = ["build", "offline_roles"]

ENGINE_RESTARTS = 10


def offline_roles(responses: str) -> tuple[type[Any] | None, type[Any] | None]:
    """The classes of trainer and actor for an algorithm whose responses are in the data; ``None``: the usual ones."""
    if responses == "sampled":
        return None, None
    from rlmesh.rl.offline.roles import OfflineActor, RewardModelRole
    from rlmesh.rl.offline.trainer import OfflineTrainer, RewardModelTrainer

    return (RewardModelTrainer, RewardModelRole) if responses == "ranked" else (OfflineTrainer, OfflineActor)


def build(run: Run, *, trainer: type[Any] | None = None, actor: type[Any] | None = None) -> DLJob:
    """Describe the job of a run, with other classes of trainer and actor if these are given.

    Without GPUs, roles that share devices get virtual devices, so that they take turns as on GPUs.
    """
    from rlmesh.rl.roles.fused import ActorRollout, ActorRolloutRef
    from rlmesh.rl.roles.reward import add_reward_roles

    given = offline_roles(run.algorithm.responses)
    trainer, actor = trainer or given[0], actor or given[1]

    placed, needs = run.placed, run.algorithm.needs
    gpus = bool(run.devices_per_node)
    devices = run.devices_per_node or max(8, -(-max(run.actor.ranks, run.critic.ranks) // run.nodes))
    share: dict[str, Any] = {"accelerator": 1} if gpus or placed != "separate" else {"cpu": 1}
    builder = RLJobBuilder().config(run).node_num(run.nodes)
    builder = builder.device_type("GPU" if gpus else "CPU").device_per_node(devices)
    builder.trainer(trainer).resource(cpu=1)
    fused = {True: ActorRolloutRef, False: ActorRollout}["reference" in needs] if placed == "fused" else actor
    builder.actor(fused).resource(**share).nnodes(run.nodes).nproc_per_node(-(-run.actor.ranks // run.nodes))
    on_devices = ["ACTOR"]
    sampled, ranked = run.algorithm.responses == "sampled", run.algorithm.responses == "ranked"
    if placed != "fused" and sampled:
        # A restart loses no state of an engine, and a prompt that kills engines does so several times.
        builder.rollout().resource(**share).total(run.rollout.engines).max_restarts(ENGINE_RESTARTS)
        on_devices.append("ROLLOUT")
    if placed != "fused" and "reference" in needs:
        builder.reference().resource(**share).total(1)
        on_devices.append("REFERENCE")
    if "critic" in needs and not ranked:
        builder.critic().resource(**share).nnodes(run.nodes).nproc_per_node(-(-run.critic.ranks // run.nodes))
        on_devices.append("CRITIC")
    on_devices += add_reward_roles(builder, run.scored, share)
    if placed != "separate" and len(on_devices) > 1:
        builder.with_collocation(*on_devices)
    return builder.build()
