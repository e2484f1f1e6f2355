"""Submit the PPO job: six roles in eight processes.

rlmesh launch examples/ppo/main.py -- --job_name demo
python examples/ppo/main.py --job_name demo
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))  # so that the roles are modules of the package "ppo"

from job_settings import Limits, SettingsParser, settings_of  # noqa: E402, I001
from ppo.config import PPOConfig  # noqa: E402

from rlmesh import RLJobBuilder, RLRoleType  # noqa: E402

P = "ppo"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = SettingsParser(
        description="PPO on a tiny language model that learns to spell words backwards.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        check=faults,
    )
    parser.add_argument("--job_name", default="ppo")
    parser.add_argument("--dry_run", action="store_true", help="print the job as JSON and do not run it")
    parser.add_argument("--skip_node_check", action="store_true")

    cluster = parser.add_argument_group("cluster")
    members = Limits(least=1)
    parser.add_setting(cluster, "device_per_node", 8, members, "virtual slots, since the job runs on CPU")
    for role in ("actor", "critic", "ref", "reward"):
        parser.add_setting(cluster, f"{role}_num_nodes", 1, members, "nodes of the role")
        parser.add_setting(
            cluster, f"{role}_num_gpus_per_node", 2 if role == "actor" else 1, members, "ranks on each node"
        )
    parser.add_setting(cluster, "rollout_num_engines", 2, members, "members of the role")

    parser.add_settings(parser.add_argument_group("training"), PPOConfig)
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def faults(args: argparse.Namespace) -> list[str]:
    """The faults of the options' combination."""
    found = []
    for role in ("actor", "critic"):
        ranks = getattr(args, f"{role}_num_nodes") * getattr(args, f"{role}_num_gpus_per_node")
        if ranks * args.minibatches > args.batch_size:
            found.append(
                f"--batch_size {args.batch_size}: {ranks} ranks of the {role} with {args.minibatches} minibatches each "
                f"need at least {ranks * args.minibatches} prompts"
            )
    return found


def submit(args: argparse.Namespace) -> None:
    # 1. Create a job builder
    builder = RLJobBuilder().config(asdict(settings_of(args, PPOConfig)))
    builder.device_type("CPU").device_per_node(args.device_per_node)

    # 2. Define workloads / roles
    builder.trainer(f"{P}.ppo_trainer.PPOTrainerActor").resource(cpu=1)
    (
        builder.actor(f"{P}.ppo_actor.PolicyModelActor")
        .resource(accelerator=1)
        .nnodes(args.actor_num_nodes)
        .nproc_per_node(args.actor_num_gpus_per_node)
    )
    (
        builder.critic(f"{P}.ppo_critic.CriticModelActor")
        .resource(accelerator=0.4)
        .nnodes(args.critic_num_nodes)
        .nproc_per_node(args.critic_num_gpus_per_node)
    )
    (builder.rollout(f"{P}.ppo_rollout.RolloutActor").resource(accelerator=1).total(args.rollout_num_engines))
    # optional reference role
    if args.init_kl_coef != 0:
        (
            builder.role(RLRoleType.REFERENCE.name)
            .train(f"{P}.ppo_reference.PPOReferenceActor")
            .resource(accelerator=0.4)
            .nnodes(args.ref_num_nodes)
            .nproc_per_node(args.ref_num_gpus_per_node)
        )
    (
        builder.role(RLRoleType.REWARD.name)
        .train(f"{P}.ppo_reward.RewardModelActor")
        .resource(accelerator=0.4)
        .nnodes(args.reward_num_nodes)
        .nproc_per_node(args.reward_num_gpus_per_node)
    )

    # 3. Build and submit
    job = builder.build()
    # optional modifications before submission
    if args.skip_node_check:
        for workload in job.workloads.values():
            if workload.backend == "elastic":
                workload.comm_pre_check = False
    if args.dry_run:
        print(job.model_dump_json(indent=2))
    else:
        job.submit(args.job_name)


if __name__ == "__main__":
    submit(parse_args())
