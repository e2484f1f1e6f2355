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

from job_settings import add_settings, settings_of  # noqa: E402, I001
from ppo.config import PPOConfig  # noqa: E402

from rlmesh import RLJobBuilder, RLRoleType  # noqa: E402

P = "ppo"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PPO on a tiny language model that learns to spell words backwards.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--job_name", default="ppo")
    parser.add_argument("--dry_run", action="store_true", help="print the job as JSON and do not run it")
    parser.add_argument("--skip_node_check", action="store_true")

    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--device_per_node", type=int, default=8, help="virtual slots, since this runs on CPU")
    cluster.add_argument("--actor_num_nodes", type=int, default=1)
    cluster.add_argument("--actor_num_gpus_per_node", type=int, default=2)
    cluster.add_argument("--critic_num_nodes", type=int, default=1)
    cluster.add_argument("--critic_num_gpus_per_node", type=int, default=1)
    cluster.add_argument("--ref_num_nodes", type=int, default=1)
    cluster.add_argument("--ref_num_gpus_per_node", type=int, default=1)
    cluster.add_argument("--reward_num_nodes", type=int, default=1)
    cluster.add_argument("--reward_num_gpus_per_node", type=int, default=1)
    cluster.add_argument("--rollout_num_engines", type=int, default=2)

    add_settings(parser.add_argument_group("training"), PPOConfig)
    return parser.parse_args(argv)


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
