"""The job of the document on reinforcement learning (001), with its import line and module strings changed."""

from rlmesh import RLJobBuilder

rl_job = (
    RLJobBuilder()
    # how many nodes for training
    .node_num(3)
    # how many devices per node
    .device_per_node(2)
    # the full configurations for training with dict or omega-config format
    .config({"c1": "v1"})
    # the global envs for training with dict format
    .global_env({"e0": "v0"})
    # trainer's module and class
    # can be automatically populated when a default framework integration implementation is available
    .trainer("tests.seeds.roles_001", "TestInteractiveTrainer")
    # actor's module and class
    # can be automatically populated when a default framework integration implementation is available
    .actor("tests.seeds.roles_001", "TestActor")
    # total number of the actor
    .total(2)
    # number of the actor per node
    .per_node(1)
    # envs for actor, higher priority than 'global_env'
    .env({"e1": "v1"})
    # rollout's module and class
    # can be automatically populated when a default framework integration implementation is available
    .rollout("tests.seeds.roles_001", "TestRollout")
    .total(2)
    .per_node(1)
    # reference's module and class
    # can be automatically populated when a default framework integration implementation is available
    .reference("tests.seeds.roles_001", "TestReference")
    .total(2)
    .per_node(1)
    .build()
)

# submit the job for running
rl_job.submit("test")
