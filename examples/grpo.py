"""GRPO on a small model that spells words backwards; needs no GPU. The first program makes the model in a folder:

python examples/grpo_model.py tiny && python examples/grpo.py tiny
"""

import sys

from rlmesh.rl import GRPO, ActorSettings, RolloutSettings, Run, Score


def spelled(response, ground_truth):
    letters = response.replace(" ", "")
    right = sum(a == b for a, b in zip(letters, ground_truth, strict=False))
    return Score(right / max(len(letters), len(ground_truth)), metrics={"right": float(letters == ground_truth)})


if __name__ == "__main__":
    folder, *words = sys.argv[1:] or ["tiny"]
    run = Run.from_args(
        words, model=folder, data=f"{folder}/train.jsonl", validation=f"{folder}/validation.jsonl", rewards=[spelled],
        algorithm=GRPO(samples=8), steps=190, batch_size=128,
        actor=ActorSettings(lr=5e-4, warmup_steps=5, ranks=2), rollout=RolloutSettings(engines=2, max_tokens=6),
    )  # fmt: skip
    print("held-out accuracy:", run.submit("grpo").metrics["val/reward/spelled/right"])
