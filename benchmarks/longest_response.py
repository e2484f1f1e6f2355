"""The longest response that can be trained on within a share of a GPU's memory, beside TRL's.

python benchmarks/longest_response.py                       TRL, TRL with Liger, and rlmesh; 24 GiB
python benchmarks/longest_response.py --device cpu --shape check --most 64    the same steps, to try the program

One prompt with two responses of equal length, one response per pass; activation checkpointing in the layers on all
sides. Lengths double until a step needs more memory than the allocator may take; then three lengths between the last
two are tried. Each side is a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launcher"), str(ROOT / "benchmarks")]

from post_training_samples import SHAPES, RecordedBatch, Shape, build_model, special_ids  # noqa: E402
from post_training_trl import Settings, TrlRun  # noqa: E402

SIDES = ("trl", "trl with Liger", "rlmesh")
GIB = 1 << 30


def batch_of(shape: Shape) -> RecordedBatch:
    """One group whose responses all have the most tokens."""
    _, end = special_ids(shape)
    row = [i % 40 for i in range(shape.response_tokens - 1)] + [end]
    prompt = [i % 30 for i in range(shape.prompt_tokens)]
    return RecordedBatch([prompt], [[list(row) for _ in range(shape.samples)]], [[0.0, 1.0]])


def step(side: str, shape: Shape, model: Any, device: str) -> None:
    """One step of training."""
    settings = Settings("dapo", lr=1e-6, activation_checkpointing=True)
    if side == "rlmesh":
        from post_training_rlmesh import LocalRun

        LocalRun(model, shape.samples, shape.response_tokens, settings).step(batch_of(shape))
        return
    options: dict[str, Any] = {"use_liger_kernel": True} if side != "trl" else {}
    TrlRun(model, shape, [batch_of(shape)], settings, device=device, **options).train()


def longest(side: str, shape: Shape, device: str, gib: float, most: int) -> dict[str, Any]:
    """The longest response of a side, and the peak of memory at each length that fits."""
    import torch

    dtype = torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total)
    model = build_model(replace(shape, response_tokens=most), dtype=dtype).to(device)
    peaks: dict[int, float] = {}

    def fits(tokens: int) -> bool:
        at = replace(shape, prompts=1, samples=2, response_tokens=tokens, micro_batch=1)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            step(side, at, model, device)
        except torch.OutOfMemoryError:
            return False
        finally:
            model.zero_grad(set_to_none=True)
        peaks[tokens] = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
        print(f"{side}: {tokens:,} tokens, peak {peaks[tokens]:.2f} GiB", file=sys.stderr, flush=True)
        return True

    tokens = min(2048, most // 4)
    found = 0
    while tokens <= most and fits(tokens):
        found, tokens = tokens, tokens * 2
    for more in (5, 6, 7) if found < most else ():
        if not fits(tokens // 2 * more // 4):
            break
        found = tokens // 2 * more // 4
    return {"side": side, "tokens": found, "peak_GiB": peaks.get(found, 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--gib", type=float, default=24.0, help="the most that the allocator takes")
    parser.add_argument("--most", type=int, default=131072, help="tokens")
    parser.add_argument("--side", choices=SIDES, help="one side alone, in this process")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(longest(args.side, SHAPES[args.shape], args.device, args.gib, args.most)))
        return
    results = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--shape", args.shape, "--device", args.device]
        command += ["--gib", str(args.gib), "--most", str(args.most)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = results[side] = json.loads(done.stdout.splitlines()[-1])
        print(f"{side:16}{found['tokens']:>10,} tokens  peak {found['peak_GiB']:.2f} GiB", flush=True)
    for side in SIDES[:2]:
        if results[side]["tokens"]:
            print(f"rlmesh / {side}: {results['rlmesh']['tokens'] / results[side]['tokens']:.2f}")


if __name__ == "__main__":
    main()
