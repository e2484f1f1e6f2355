"""Document 002, main.py: the block "inside submit()", with imports and the two missing f-prefixes added."""

# The documents' code, as it is written there: neither typed nor sorted as ours.
# mypy: ignore-errors
# ruff: noqa
import argparse

from omegaconf import OmegaConf

from rlmesh import RLJobBuilder, RLRoleType

P = "tests.seeds.openrlhf.ppo"


def args_2_omega_conf(args):
    return OmegaConf.create(vars(args))


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    for name in ("actor", "critic", "ref", "reward"):
        parser.add_argument(f"--{name}_num_nodes", type=int, default=1)
        parser.add_argument(f"--{name}_num_gpus_per_node", type=int, default=1)
    parser.add_argument("--vllm_num_engines", type=int, default=1)
    parser.add_argument("--init_kl_coef", type=float, default=0.01)
    parser.add_argument("--job_name", default="openrlhf-ppo")
    parser.add_argument("--skip_node_check", action="store_true")
    parser.add_argument("--dry_run", action="store_true")
    return parser.parse_args(argv)


def submit(args):
    # examples/unified/rl/openrlhf/ppo/main.py
    # Inside submit()

    # 1. Create a job builder
    builder = RLJobBuilder().config(args_2_omega_conf(args))

    # 2. Define workloads / roles
    builder.trainer(f"{P}.ppo_trainer.PPOTrainerActor").resource(cpu=4)
    (
        builder.actor(f"{P}.ppo_actor.PolicyModelActor")
        .resource(accelerator=1)
        .nnodes(args.actor_num_nodes)
        .nproc_per_node(args.actor_num_gpus_per_node)
    )
    (
        builder.critic(f"{P}.ppo_critic.CriticModelRayActor")
        .resource(accelerator=0.4)
        .nnodes(args.critic_num_nodes)
        .nproc_per_node(args.critic_num_gpus_per_node)
    )
    (builder.rollout(f"{P}.ppo_rollout.VLLMActor").resource(accelerator=1).total(args.vllm_num_engines))
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
        .train(f"{P}.ppo_reward.RewardModelRayActor")
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
    print(job.model_dump_json(indent=2))
    if not args.dry_run:
        job.submit(args.job_name)


if __name__ == "__main__":
    submit(parse_args())
