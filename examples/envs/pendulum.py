"""SAC swings a pendulum up, in about two minutes: python pendulum.py"""

from rlmesh.envs import SACConfig

config = (
    SACConfig()
    .environment("Pendulum-v1")
    .training(lr=1e-3, train_batch_size=256, num_steps_sampled_before_learning_starts=500)
    .rl_module(model_config={"fcnet_hiddens": (64, 64), "fcnet_activation": "relu"})
    .reporting(min_env_steps_per_iteration=1000, metrics_num_episodes_for_smoothing=5)
    .learners(torch_threads=1)
    .debugging(seed=0)
)

if __name__ == "__main__":
    with config.build() as algorithm:
        for _ in range(10):
            result = algorithm.train()
            mean = result["env_runners"]["episode_return_mean"]
            print(f"{algorithm.window.env_steps} steps, mean return {mean:.0f}", flush=True)
            if mean >= -250:
                break
        print(f"mean return of an evaluation: {algorithm.evaluate()['episode_reward_mean']:.0f}")
