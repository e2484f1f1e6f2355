"""PPO balances a pole, in less than a minute: python cartpole.py"""

from rlmesh.envs import PPOConfig

with PPOConfig().environment("CartPole-v1").training(train_batch_size=1024, minibatch_size=128).build() as algorithm:
    while not (mean := algorithm.train()["env_runners"]["episode_return_mean"]) >= 475:
        print(f"{algorithm.window.env_steps} steps, mean return {mean:.0f}")
    print(f"mean return of an evaluation: {algorithm.evaluate()['episode_reward_mean']:.0f}")
