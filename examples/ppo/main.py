"""Submit the PPO job, six roles in eight processes: rlmesh launch examples/ppo/main.py -- --job_name demo"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

EXAMPLES = Path(__file__).resolve().parents[1]
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # so that the roles are modules of the package "ppo"

from grpo_model import make  # noqa: E402
from job_settings import Limits, SettingsParser  # noqa: E402

from rlmesh import RLJobBuilder, RLRoleType  # noqa: E402
from rlmesh.rl.trainers.run import Run  # noqa: E402

P = "ppo"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = SettingsParser(description="PPO on a tiny language model that learns to spell words backwards.")
    parser.add_argument("--job_name", default="ppo")
    parser.add_argument("--pretrain", default="", help="folder of model and data, made if missing: runs/tiny-SEED")
    parser.add_argument("--dry_run", action="store_true", help="print the job as JSON and do not run it")
    parser.add_argument("--skip_node_check", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of Run: actor.lr=1e-3")
    counts = {"steps": 150, "device_per_node": 8, "vllm_num_engines": 2, "actor_num_gpus_per_node": 2}
    for role in ("actor", "critic", "ref", "reward"):
        counts = {f"{role}_num_nodes": 1, f"{role}_num_gpus_per_node": 1} | counts
    for name, default in counts.items():
        parser.add_setting(parser, name, default, Limits(least=1), f"by default {default}")
    parser.add_setting(parser, "seed", 0, Limits(least=0), "of model, data and samples")
    parser.add_setting(parser, "init_kl_coef", 0.01, Limits(least=0), "of the KL penalty; 0: no reference role")
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def args_2_omega_conf(args: argparse.Namespace) -> DictConfig:
    """The settings of the training, with the keys of `Run`. All roles read them."""
    folder = Path(args.pretrain or f"runs/tiny-{args.seed}").absolute()
    learner = {"warmup_steps": 10, "final_lr": 0.1, "weight_decay": 0.01, "minibatches": 2, "token_budget": 1024}
    config = OmegaConf.create({
        "model": str(folder),
        "data": f"{folder}/train.jsonl", "validation": f"{folder}/validation.jsonl",
        "rewards": [f"{P}.common:exact_match"],
        "algorithm": {"name": "ppo", "kl": args.init_kl_coef},
        "train": "fsdp2", "steps": args.steps, "seed": args.seed, "batch_size": 512, "max_prompt_tokens": 58,
        "validate_every": 10, "save_every": 10,
        "actor": {**learner, "lr": 5e-4, "ranks": args.actor_num_nodes * args.actor_num_gpus_per_node},
        "critic": {**learner, "lr": 1e-3, "ranks": args.critic_num_nodes * args.critic_num_gpus_per_node},
        "rollout": {"engines": args.vllm_num_engines, "max_tokens": 6},
    })  # fmt: skip
    config.merge_with_dotlist(args.set)
    return config


def submit(args: argparse.Namespace) -> None:
    config = args_2_omega_conf(args)
    run = Run.from_config(config)  # refuses wrong settings
    # 1. Create a job builder
    builder = RLJobBuilder().config(config).device_type("CPU").device_per_node(args.device_per_node)

    # 2. Define workloads / roles
    builder.trainer(f"{P}.ppo_trainer.PPOTrainerActor").resource(cpu=1)
    actor = builder.actor(f"{P}.ppo_actor.PolicyModelActor").resource(accelerator=1)
    actor.nnodes(args.actor_num_nodes).nproc_per_node(args.actor_num_gpus_per_node)
    critic = builder.critic(f"{P}.ppo_critic.CriticModelRayActor").resource(accelerator=0.4)
    critic.nnodes(args.critic_num_nodes).nproc_per_node(args.critic_num_gpus_per_node)
    builder.rollout(f"{P}.ppo_rollout.VLLMActor").resource(accelerator=1).total(args.vllm_num_engines)
    if args.init_kl_coef != 0:  # optional reference role
        reference = builder.role(RLRoleType.REFERENCE.name).train(f"{P}.ppo_reference.PPOReferenceActor")
        reference.resource(accelerator=0.4).nnodes(args.ref_num_nodes).nproc_per_node(args.ref_num_gpus_per_node)
    reward = builder.role(RLRoleType.REWARD.name).train(f"{P}.ppo_reward.RewardModelRayActor")
    reward.resource(accelerator=0.4).nnodes(args.reward_num_nodes).nproc_per_node(args.reward_num_gpus_per_node)

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
        if not Path(run.model).exists():
            print(f"{run.model}: {make(Path(run.model), seed=args.seed):.0%} of the sampled answers are right")
        run.check()
        job.submit(args.job_name)


if __name__ == "__main__":
    submit(parse_args())
