"""The rows of benchmarks/envs_compare.py: what is measured, who is beside rlmesh, and the goals."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ROWS", "EnvRow"]


class EnvRow(NamedTuple):
    """A row of the table.

    Attributes:
        title: what is measured.
        key: the number's name in the result of a program.
        unit: its unit.
        peers: the libraries that rlmesh is compared with.
        goals: by a library, ``"best"`` of the peers or ``"rlmesh"``: the ratio of rlmesh's median to that library's;
            for ``"rlmesh"``, the median itself; for ``"noise"``, a number in the 95 % interval of the mean.
        beside: libraries that are measured and have no part in the goals.
        higher: True if more is better.
        also: other rows whose peers belong to ``"best"``.
        limit_s: seconds after which a training stops; what says nothing a minute later is killed.
    """

    title: str
    key: str
    unit: str
    peers: tuple[str, ...]
    goals: dict[str, float]
    beside: tuple[str, ...] = ()
    higher: bool = False
    also: tuple[str, ...] = ()
    limit_s: float = 240


def _sampling(title: str, peers: tuple[str, ...], beside: tuple[str, ...], goals: dict[str, float]) -> EnvRow:
    return EnvRow(title, "steps_per_s", "steps/s", peers, goals, beside, higher=True)


STEPPERS = ("pufferlib", "envpool")
ROWS = {
    "sampling_16": _sampling(
        "sampling, one process x 16", ("sb3", "rllib", "cleanrl", "torchrl"), STEPPERS, {"rllib": 3, "best": 1.3}
    ),
    "sampling_2x8": _sampling("sampling, 2 runners x 8", ("rllib", "torchrl"), STEPPERS, {"rllib": 3, "best": 1.3}),
    "frames_16": _sampling("frames, one process x 16", ("rllib",), (), {"rllib": 2}),
    "frames_2x8": _sampling("frames, 2 runners x 8", ("rllib",), (), {"rllib": 2}),
    "frames_copies": EnvRow("frames, copies of a trivial step", "percent", "%", (), {"rlmesh": 20}),
    "ppo_zoo": EnvRow("PPO to 475, SB3 zoo's settings", "seconds", "s", ("sb3", "torchrl"), {"best": 1}),
    "ppo_cleanrl": EnvRow("PPO to 475, CleanRL's settings", "seconds", "s", ("cleanrl",), {"cleanrl": 1}),
    "ppo_rllib": EnvRow(
        "PPO to 475, RLlib's settings", "seconds", "s", ("rllib",), {"rllib": 0.5}, limit_s=300
    ),
    "ppo_own": EnvRow(
        "PPO to 475, own settings", "seconds", "s", (), {"best": 2 / 3}, also=("ppo_zoo", "ppo_cleanrl", "ppo_rllib")
    ),
    "dqn": EnvRow("DQN, CartPole to 195", "steps", "steps", ("sb3",), {"sb3": 1.1}),
    "sac": EnvRow("SAC, Pendulum to -250", "steps", "steps", ("sb3",), {"sb3": 1.1}),
    "td3": EnvRow("TD3, Pendulum to -250", "steps", "steps", ("sb3",), {"sb3": 1.1}),
    "impala": EnvRow("IMPALA, CartPole to 150", "steps", "steps", ("rllib",), {"rllib": 1.1}),
    "replay": EnvRow(
        "prioritised replay, 256 a round", "rounds_per_s", "rounds/s", ("rllib", "torchrl"),
        {"rllib": 20, "torchrl": 1}, higher=True,
    ),
    "appo": EnvRow("APPO against PPO, 2 runners", "ratio", "x", (), {"rlmesh": 1.2}, higher=True),
    "kills": EnvRow("a runner killed every 5 s, for 60 s", "difference", "return", (), {"noise": 0}, limit_s=300),
    "first_1": EnvRow("first result, one process", "seconds", "s", ("sb3", "rllib"), {"rlmesh": 2}),
    "first_2": EnvRow("first result, 2 runners", "seconds", "s", ("rllib",), {"rlmesh": 4}),
}  # fmt: skip
