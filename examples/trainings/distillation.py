"""Distillation on policy: a small model samples, and learns from a larger teacher's probabilities of its samples.

python examples/trainings/tiny_model.py small
python examples/trainings/tiny_model.py large 64
python examples/trainings/sft.py large                                    # prints the folder of the teacher
python examples/trainings/distillation.py small FOLDER
"""

import sys

from sft import ROWS

from rlmesh.rl.algorithms import OnPolicyDistillation
from rlmesh.rl.trainers.run import Run
from rlmesh.rl.trainers.settings import ActorSettings, ReferenceSettings, RolloutSettings


def training(model: str, teacher: str) -> Run:
    return Run(
        model=model, data=ROWS, algorithm=OnPolicyDistillation(samples=4), reference=ReferenceSettings(model=teacher),
        steps=80, batch_size=32, actor=ActorSettings(lr=5e-3, warmup_steps=5), rollout=RolloutSettings(max_tokens=4),
        save_every=1000,
    )  # fmt: skip


if __name__ == "__main__":
    print("divergence from the teacher:", training(*sys.argv[1:]).submit("distillation").metrics["teacher_kl"])
