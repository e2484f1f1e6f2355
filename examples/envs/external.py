"""Simulators outside of the job: python external.py

The algorithm has the spaces only. Two simulators, programs of their own, connect to its job with address and key, ask
for actions, and tell rewards; `simulator` is what would run beside a game or a robot:

    python external.py --simulator --address unix:///…/master --key-file …/key
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import gymnasium as gym

from rlmesh.envs import EpisodeLost, ExternalEnv, ExternalEnvClient, PPOConfig
from rlmesh.errors import RLMeshError


def simulator(address: str, key_file: str, seed: int) -> None:
    """Play episodes until the job ends."""
    env = gym.make("CartPole-v1")
    with ExternalEnvClient(address, key_file) as client:
        while True:
            observation, _ = env.reset(seed=seed)
            seed += 2
            try:
                episode = client.start_episode()
                ended = cut = False
                while not (ended or cut):
                    action = client.get_action(episode, observation)
                    observation, reward, ended, cut, _ = env.step(action)
                    client.log_returns(episode, float(reward))
                client.end_episode(episode, observation, truncated=cut)
            except EpisodeLost:
                continue  # the runner restarted
            except RLMeshError:
                return  # the job has ended


def train(goal: float) -> None:
    """Train until the mean return is reached."""
    spaces = gym.make("CartPole-v1")
    config = (
        PPOConfig()
        .environment(ExternalEnv(spaces.observation_space, spaces.action_space))
        .env_runners(num_env_runners=1)
        .training(train_batch_size=1024, minibatch_size=128)
        .learners(torch_threads=1)
        .debugging(seed=0)
    )
    with config.build() as algorithm:
        address, key_file = algorithm.env_runner_group.connection()
        command = [sys.executable, __file__, "--simulator", "--address", address, "--key-file", key_file]
        simulators = [subprocess.Popen([*command, "--seed", str(seed)]) for seed in range(2)]
        try:
            mean = 0.0
            while not mean >= goal:
                mean = algorithm.train()["env_runners"]["episode_return_mean"]
                print(f"{algorithm.window.env_steps} steps, mean return {mean:.0f}", flush=True)
        finally:
            for program in simulators:
                program.terminate()
                program.wait(30)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulator", action="store_true", help="connect, instead of training")
    parser.add_argument("--address", help="of the job")
    parser.add_argument("--key-file", help="of the job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goal", type=float, default=150.0, help="mean return that ends the training")
    options = parser.parse_args()
    if options.simulator:
        simulator(options.address, options.key_file, options.seed)
    else:
        train(options.goal)
