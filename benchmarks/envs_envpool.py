"""One measurement of EnvPool: ``envs_envpool.py ROW SEED [LIMIT_S]``, run by envs_compare.py, prints JSON.

EnvPool has no policy: the one of envs_policy.py chooses. Its CartPole-v1 is written in C++, not Gymnasium's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from envs_measure import Rows, main, rate


def sampling(threads: int, seed: int) -> dict[str, Any]:
    """Steps a second of 16 environments, inference included."""
    import envpool
    from envs_policy import policy

    pool = envpool.make_gymnasium("CartPole-v1", num_envs=16, num_threads=threads, seed=seed)
    choose = policy(seed)
    obs, _ = pool.reset()

    def collect() -> int:
        nonlocal obs
        for _ in range(250):
            obs = pool.step(choose(obs))[0]
        return 4000

    return rate(collect)


ROWS: Rows = {"sampling_16": partial(sampling, 1), "sampling_2x8": partial(sampling, 2)}

if __name__ == "__main__":
    main(ROWS)
