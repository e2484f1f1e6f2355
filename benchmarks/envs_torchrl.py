"""One measurement of TorchRL: ``envs_torchrl.py ROW SEED [LIMIT_S]``, run by envs_compare.py, prints JSON.

TorchRL has parts, and no settings for CartPole-v1: they are put together here, with the settings of the row.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from functools import partial
from typing import Any

from envs_measure import Rows, Way, main, rate, rounds

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def environment(environments: int, seed: int) -> Any:
    from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv

    one = partial(GymEnv, "CartPole-v1", device="cpu", categorical_action_encoding=True)
    several = SerialEnv(environments, one)
    several.set_seed(seed)
    return TransformedEnv(several, RewardSum())


def networks(seed: int) -> tuple[Any, Any]:
    """An actor and a critic with two layers of 64, tanh."""
    import torch
    from tensordict.nn import TensorDictModule
    from torchrl.modules import MLP, ProbabilisticActor, ValueOperator

    torch.manual_seed(seed)
    layers: dict[str, Any] = {"in_features": 4, "num_cells": [64, 64], "activation_class": torch.nn.Tanh}
    logits, value = MLP(out_features=2, **layers), MLP(out_features=1, **layers)
    for network in (logits, value):
        linear = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        for layer in linear:
            torch.nn.init.orthogonal_(layer.weight, 2**0.5 if layer is not linear[-1] else 1.0)
            torch.nn.init.zeros_(layer.bias)
    torch.nn.init.orthogonal_(logits[-1].weight, 0.01)
    actor = ProbabilisticActor(
        TensorDictModule(logits, in_keys=["observation"], out_keys=["logits"]), in_keys=["logits"],
        distribution_class=torch.distributions.Categorical, return_log_prob=True,
    )  # fmt: skip
    return actor, ValueOperator(value, in_keys=["observation"])


def sampling(runners: int, environments: int, seed: int) -> dict[str, Any]:
    """Steps a second, inference included."""
    from torchrl.collectors import Collector, MultiSyncCollector

    actor, _ = networks(seed)
    create = partial(environment, environments, seed)
    given: dict[str, Any] = {"frames_per_batch": 4000, "total_frames": -1}
    collector = MultiSyncCollector([create] * runners, actor, **given) if runners else Collector(create, actor, **given)
    batches = iter(collector)
    found = rate(lambda: next(batches).numel())
    collector.shutdown()
    return found


def ppo(seed: int) -> dict[str, Any]:
    """Seconds and steps until the mean of 100 episodes is 475, with the settings of rl-baselines3-zoo."""
    import torch
    from torchrl.collectors import Collector
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    most = 100_000
    way = Way(475, most)
    actor, critic = networks(seed)
    collector = Collector(partial(environment, 8, seed), actor, frames_per_batch=256, total_frames=-1)
    advantages = GAE(gamma=0.98, lmbda=0.8, value_network=critic)
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2",
        normalize_advantage=True,
    )  # fmt: skip
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, eps=1e-5)
    last: deque[float] = deque(maxlen=100)
    steps = 0
    for batch in collector:
        steps += batch.numel()
        last.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
        left = max(0.0, 1 - steps / most)
        loss.clip_epsilon.fill_(max(0.2 * left, 1e-8))
        optimizer.param_groups[0]["lr"] = 1e-3 * left
        with torch.no_grad():
            rows = advantages(batch).reshape(-1)
        for _ in range(20):
            found = loss(rows)
            optimizer.zero_grad()
            (found["loss_objective"] + found["loss_critic"]).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
        if way.ends(steps, sum(last) / len(last) if last else None, len(last) == 100):
            break
    collector.shutdown()
    return way.result


def load_extension() -> None:
    """Loads TorchRL's extension; if the built one is for another torch, compiles the sources that the package has.

    torch keeps the result in its cache of extensions, so this takes a minute once.
    """
    import os
    import sys
    from pathlib import Path

    import torchrl
    from torch.utils import cpp_extension

    try:
        import torchrl._torchrl
    except ImportError:
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # where the peers' ninja is
        folder = Path(torchrl.__file__).parent
        sources = [str(folder / "csrc" / name) for name in ("pybind.cpp", "utils.cpp")]
        sys.modules["torchrl._torchrl"] = cpp_extension.load("_torchrl", sources, extra_cflags=["-O3", "-std=c++20"])


def replay(seed: int) -> dict[str, Any]:
    """Rounds a second with 1,000,000 transitions: add 256, sample 256 by priority, update priorities."""
    load_extension()
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    torch.manual_seed(seed)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(1_000_000), batch_size=256, priority_key="td_error"
    )

    def rows(count: int) -> Any:
        return TensorDict(
            {
                "obs": torch.rand(count, 4), "new_obs": torch.rand(count, 4), "actions": torch.randint(2, (count,)),
                "rewards": torch.rand(count), "terminateds": torch.zeros(count, dtype=torch.bool),
                "truncateds": torch.zeros(count, dtype=torch.bool),
            },
            [count],
        )  # fmt: skip

    for _ in range(100):
        buffer.extend(rows(10_000))
    few = rows(256)

    def one() -> None:
        buffer.extend(few)
        batch = buffer.sample()
        batch["td_error"] = torch.rand(256)
        buffer.update_tensordict_priority(batch)

    return rounds(one, len(buffer))


ROWS: Rows = {
    "sampling_16": partial(sampling, 0, 16), "sampling_2x8": partial(sampling, 2, 8), "ppo_zoo": ppo, "replay": replay
}  # fmt: skip

if __name__ == "__main__":
    main(ROWS)
