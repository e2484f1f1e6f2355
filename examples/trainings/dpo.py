"""Direct preference optimisation: words in the order of the alphabet are preferred to words in the other order.

python examples/trainings/tiny_model.py tiny && python examples/trainings/dpo.py tiny
"""

import itertools
import sys

from rlmesh.rl.algorithms import DPO
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings

ROWS = [
    {"prompt": f"{a}{c}{b}>", "chosen": f"{a}{b}{c}", "rejected": f"{c}{b}{a}"}
    for a, b, c in itertools.combinations("abcdefgh", 3)
]


def training(model: str) -> Run:
    return Run(
        model=model, data=ROWS[::2] + ROWS[1::4], validation=ROWS[3::4], algorithm=DPO(beta=0.5), steps=60,
        batch_size=16, actor=ActorSettings(lr=5e-3), save_every=1000,
    )  # fmt: skip


if __name__ == "__main__":
    metrics = training(sys.argv[1]).submit("dpo").metrics
    print("share of held-out pairs that are ranked right:", metrics["val/dpo/accuracy"])
