"""GRPO beside TRL 1.16 on identical recorded samples, in float32: losses and weights step by step.

python benchmarks/trl_equality.py                    prints the largest differences; needs TRL
python benchmarks/trl_equality.py --write FILE       also writes what TRL computed, for the tests

Both sides train a copy of one small model with the same settings. TRL computes padded micro-batches of rows, rlmesh
packs with shared prompts. Losses are compared relative to the larger of 1 and the loss. AdamW's eps is 1e-6 on both
sides: with 1e-8, an entry whose gradient is as small as the rounding error moves by lr in the direction of that error.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from post_training_rlmesh import LocalRun  # noqa: E402
from post_training_samples import SHAPES, build_model, record  # noqa: E402
from post_training_trl import Settings, StepSeen, TrlRun, weights_of  # noqa: E402

STEPS = 20
GOAL = 1e-5
SHAPE = SHAPES["check"]


def case(loss: str, **options: Any) -> Settings:
    return Settings(loss, eps=1e-6, **options)


CASES = {
    "grpo": case("grpo"),
    "grpo, two epochs": case("grpo", epochs=2, lr=3e-3),
    "grpo, weight decay, no clipping": case("grpo", weight_decay=0.1, max_grad_norm=0.0),
    "grpo, divergence 0.04": case("grpo", kl=0.04),
    "dapo, clip-higher, two epochs": case("dapo", clip_high=0.28, epochs=2, lr=3e-3),
    "dr_grpo": case("dr_grpo"),
    "gspo, two epochs": case("gspo", clip_low=3e-4, clip_high=4e-4, epochs=2),
    "cispo, two epochs": case("cispo", clip_high=4.0, epochs=2),
    "sapo, two epochs": case("sapo", epochs=2),
}
Weights = dict[str, torch.Tensor]
Track = list[tuple[StepSeen, Weights]]


def initial_model() -> Any:
    """The model that both sides train: the same with any version of torch and transformers, and with larger weights
    than usual, so that ratios move within 20 steps."""
    model = build_model(SHAPE)
    with torch.no_grad():
        for name, value in model.named_parameters():
            drawn = np.random.default_rng(crc32(name.encode())).normal(size=tuple(value.shape))
            value.copy_(torch.from_numpy(1 + 0.1 * drawn if "norm" in name else 0.06 * drawn))
    return model


def trl_track(settings: Settings, steps: int = STEPS) -> Track:
    """Loss, gradient norm and weights after each optimizer step of TRL."""
    from transformers import AutoModelForCausalLM

    after: list[Weights] = []
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        initial_model().save_pretrained(folder)  # TRL loads the reference from the folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        run = TrlRun(model, SHAPE, record(SHAPE, steps // settings.epochs), settings)
        run.on_step = lambda _: after.append(weights_of(model))
        run.train()
    return list(zip(run.seen, after, strict=True))


def rlmesh_track(settings: Settings, steps: int = STEPS) -> Track:
    """The same of rlmesh."""
    model = initial_model()
    reference = initial_model() if settings.kl else None
    run = LocalRun(model, SHAPE.samples, SHAPE.response_tokens, settings, reference=reference, token_budget=120)
    after: list[Weights] = []
    engine: Any = run.actor.engine
    inner = engine.train_step

    def train_step(*args: Any) -> Any:
        report = inner(*args)
        after.append(weights_of(model))
        return report

    engine.train_step = train_step
    seen = [one for batch in record(SHAPE, steps // settings.epochs) for one in run.step(batch)]
    return list(zip(seen, after, strict=True))


def differences(ours: Track, theirs: Track) -> list[tuple[float, float, float]]:
    """Of each step: the largest difference of loss, gradient norm (relative) and weights."""
    return [
        (
            abs(a.loss - b.loss) / max(abs(b.loss), 1.0),
            abs(a.grad_norm - b.grad_norm) / max(b.grad_norm, 1e-12),
            max(float((x[name] - y[name]).abs().max()) for name in y),
        )
        for (a, x), (b, y) in zip(ours, theirs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES], help="only this one; may be given several times")
    parser.add_argument("--write", type=Path, help="write the losses, norms and last weights of TRL as JSON")
    parser.add_argument("--each-step", action="store_true", help="print each step's differences")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import trl
    from transformers.utils import logging

    logging.disable_progress_bar()

    print(
        f"TRL {trl.__version__}, torch {torch.__version__}, Python {platform.python_version()}, float32, {STEPS} steps"
    )
    print(f"{'largest difference over the steps':36}{'loss':>10}{'norm':>10}{'weights':>10}   moved")
    written, worst = {}, 0.0
    for name, settings in CASES.items():
        if args.case and name not in args.case:
            continue
        theirs, ours = trl_track(settings), rlmesh_track(settings)
        found = differences(ours, theirs)
        before = weights_of(initial_model())
        moved = max(float((theirs[-1][1][key] - before[key]).abs().max()) for key in before)
        loss, norm, weights = (max(column) for column in zip(*found, strict=True))
        worst = max(worst, loss, weights)
        print(f"{name:36}{loss:10.1e}{norm:10.1e}{weights:10.1e}   {moved:.3f}", flush=True)
        if args.each_step:
            for step, (one, two, three) in enumerate(found, 1):
                print(f"  step {step:2}: loss {one:.1e}  norm {two:.1e}  weights {three:.1e}")
        written[name] = {
            "losses": [seen.loss for seen, _ in theirs],
            "grad_norms": [seen.grad_norm for seen, _ in theirs],
            "weights": {key: summary(value) for key, value in theirs[-1][1].items()},
        }
    if args.write:
        args.write.write_text(json.dumps({"trl": trl.__version__, "cases": written}) + "\n")
    print(f"goal: loss and weights ≤ {GOAL:g}: {'met' if worst <= GOAL else f'missed, {worst:.1e}'}")


def summary(weight: torch.Tensor) -> list[float]:
    """Four entries of a weight, from its first to its last, and its sum of squares."""
    flat = weight.flatten()
    places = torch.linspace(0, len(flat) - 1, 4).long()
    return [*flat[places].tolist(), float(flat.double().square().sum())]


if __name__ == "__main__":
    main()
