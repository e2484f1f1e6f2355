"""The code of the PPO architecture document, with other import lines: ``main_ppo.py CONFIG.yaml KEY=VALUE…``."""

from __future__ import annotations

import json
import sys
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from rlmesh.rl.verl import RayPPOTrainer, RewardManager, gsm8k, math


# fmt: off
def _select_rm_score_fn(data_source):  # type: ignore[no-untyped-def]
    if data_source == 'openai/gsm8k':
        return gsm8k.compute_score
    if data_source == 'lighteval/MATH':
        return math.compute_score
    raise NotImplementedError


def main(config: Any, tokenizer: Any) -> Any:
    if config.actor_rollout_ref.actor.strategy == 'fsdp': # for FSDP backend
        assert config.actor_rollout_ref.actor.strategy == config.critic.strategy
        from rlmesh.rl.verl import ActorRolloutRefWorker, CriticWorker, RayWorkerGroup
        ray_worker_group_cls = RayWorkerGroup

    elif config.actor_rollout_ref.actor.strategy == 'megatron': # for Megatron backend
        assert config.actor_rollout_ref.actor.strategy == config.critic.strategy
        from rlmesh.rl.verl import ActorRolloutRefWorker, CriticWorker, NVMegatronRayWorkerGroup
        ray_worker_group_cls = NVMegatronRayWorkerGroup # Ray worker class for Megatron-LM

    else:
        raise NotImplementedError

    from rlmesh.rl.verl import ResourcePoolManager, Role

    role_worker_mapping = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker
    }

    global_pool_id = 'global_pool'
    resource_pool_spec = {
        global_pool_id: [config.trainer.n_gpus_per_node] * config.trainer.nnodes,
    }
    mapping = {
        Role.ActorRollout: global_pool_id,
        Role.Critic: global_pool_id,
        Role.RefPolicy: global_pool_id,
    }

    # we should adopt a multi-source reward function here
    # - for rule-based rm, we directly call a reward score
    # - for model-based rm, we call a model
    # - for code related prompt, we send to a sandbox if there are test cases
    # - finally, we combine all the rewards together
    # - The reward type depends on the tag of the data
    if config.reward_model.enable:
        from rlmesh.rl.verl import RewardModelWorker
        role_worker_mapping[Role.RewardModel] = RewardModelWorker
        mapping[Role.RewardModel] = global_pool_id

    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0)

    # Note that we always use function-based RM for validation
    val_reward_fn = RewardManager(tokenizer=tokenizer, num_examine=1)

    resource_pool_manager = ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping)

    trainer = RayPPOTrainer(config=config,
                            tokenizer=tokenizer,
                            role_worker_mapping=role_worker_mapping,
                            resource_pool_manager=resource_pool_manager,
                            ray_worker_group_cls=ray_worker_group_cls,
                            reward_fn=reward_fn,
                            val_reward_fn=val_reward_fn)
    trainer.init_workers()
    return trainer.fit()
# fmt: on


if __name__ == "__main__":
    settings = OmegaConf.merge(OmegaConf.load(sys.argv[1]), OmegaConf.from_dotlist(sys.argv[2:]))
    model = AutoTokenizer.from_pretrained(settings.actor_rollout_ref.model.path)
    print("METRICS", json.dumps(main(settings, model)))
