"""One rank of training engines that save checkpoints, or go on from those of other engines and other numbers of ranks.

python -m tests.engines.checkpoint_ranks RANK RANKS FOLDER PLAN, with a plan in JSON: ``{"leave": [[ENGINE, FORM], …],
"take": [[ENGINE, FORM, FOLDER OF A CHECKPOINT], …]}``. A form is ``whole`` or ``adapter``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmesh.errors import UsageError
from rlmesh.rl.engines.lora import LoraOptions
from tests.engines.training_job import OPTIONS, WHOLE, make_engine, share, weights_of
from tests.engines.training_model import build_policy, policy_loss

STEPS = 2
SEEN = "seen.pt"


def engine_of(kind: str, form: str, *, seed: int) -> Any:
    """An engine whose trained weights depend on the seed; the base of an adapter does not."""
    if form == "adapter":
        return make_engine(kind, build_policy(), replace(OPTIONS, lora=LoraOptions(rank=4, seed=seed)))
    return make_engine(kind, build_policy(seed), OPTIONS)


def step(engine: Any) -> None:
    engine.train_step(share(), policy_loss(WHOLE))


def leave(kind: str, form: str, folder: Path) -> None:
    """Train and save; what was saved, and what the next step makes of it."""
    engine = engine_of(kind, form, seed=3)
    for _ in range(STEPS):
        step(engine)
    saved = weights_of(engine)
    saving = engine.save(folder)
    step(engine)
    saving.result(60)
    seen = {"saved": saved, "next": weights_of(engine)}
    engine.close()
    if dist.get_rank() == 0:
        torch.save(seen, folder / SEEN)


def take(kind: str, form: str, folder: Path) -> dict[str, Any]:
    """What another engine makes of a checkpoint."""
    engine = engine_of(kind, form, seed=5)
    engine.load(folder, weights_only=True)
    seen: dict[str, Any] = {"new": engine.steps, "weights": weights_of(engine)}
    step(engine)
    engine.load(folder)
    seen |= {"steps": engine.steps, "saved": weights_of(engine)}
    step(engine)
    seen["next"] = weights_of(engine)
    engine.close()
    if kind.startswith("zero") or find_spec("peft") is None:  # what it reads is checked by the same function
        return seen
    other = engine_of(kind, "whole" if form == "adapter" else "adapter", seed=5)
    try:
        other.load(folder)
    except UsageError as error:
        seen["refused"] = str(error)
    other.close()
    return seen


def main(rank: int, ranks: int, folder: Path, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    try:
        for kind, form in plan.get("leave", ()):
            leave(kind, form, folder / f"{kind}-{form}")
        taken = [take(kind, form, Path(saved)) for kind, form, saved in plan.get("take", ())]
        torch.save(taken, folder / f"rank-{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
