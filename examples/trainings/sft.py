"""Supervised fine-tuning: a model learns to repeat words. The result can be the model of a GRPO run (a warm-up).

python examples/trainings/tiny_model.py tiny && python examples/trainings/sft.py tiny
"""

import itertools
import random
import sys

from rlmesh.rl.algorithms import SFT
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings

ROWS = [{"prompt": f"{a}{b}{c}>", "response": f"{a}{b}{c}"} for a, b, c in itertools.product("abcdefgh", repeat=3)]
random.Random(0).shuffle(ROWS)


def training(model: str) -> Run:
    return Run(
        model=model, data=ROWS[64:], validation=ROWS[:64], algorithm=SFT(), steps=60, batch_size=32,
        actor=ActorSettings(lr=5e-3, warmup_steps=5), save_every=1000,
    )  # fmt: skip


if __name__ == "__main__":
    result = training(sys.argv[1]).submit("sft")
    print(f"loss per held-out token: {result.metrics['val/nll']:.3f}; now: Run(model={str(result.model)!r}, …)")
