"""One measurement of PufferLib: ``envs_pufferlib.py ROW SEED [LIMIT_S]``, run by envs_compare.py, prints JSON.

Its vectors step Gymnasium's CartPole-v1; the policy of envs_policy.py chooses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from envs_measure import Rows, main, rate


def environment(buf: Any = None, seed: int = 0) -> Any:
    import gymnasium
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env_creator=partial(gymnasium.make, "CartPole-v1"), buf=buf, seed=seed)


def sampling(workers: int, seed: int) -> dict[str, Any]:
    """Steps a second of 16 environments, inference included."""
    import pufferlib.vector
    from envs_policy import policy

    backend = pufferlib.vector.Multiprocessing if workers else pufferlib.vector.Serial
    more = {"num_workers": workers} if workers else {}
    vector = pufferlib.vector.make(environment, num_envs=16, backend=backend, seed=seed, **more)
    choose = policy(seed)
    obs, _ = vector.reset(seed=seed)

    def collect() -> int:
        nonlocal obs
        for _ in range(250):
            obs = vector.step(choose(obs))[0]
        return 4000

    found = rate(collect)
    vector.close()
    return found


ROWS: Rows = {"sampling_16": partial(sampling, 0), "sampling_2x8": partial(sampling, 2)}

if __name__ == "__main__":
    main(ROWS)
