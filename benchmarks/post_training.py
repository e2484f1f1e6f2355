"""GRPO on recorded samples and end to end, beside TRL's: time of a step, memory, overhead, MFU.

python benchmarks/post_training.py --shape 135m                   training phase on recorded samples, on the CPU
python benchmarks/post_training.py --shape 135m --end-to-end      sampling by transformers engines on both sides
python benchmarks/post_training.py --shape 0.5b --device cuda     training phase on one GPU; --liger: with Liger in TRL
python benchmarks/post_training.py --only rlmesh …                one side alone

Each side is a process of its own; both make one step in turns, so that a noisy machine is noisy for both. The first
steps are not counted. Useful tokens are those of prompt and response of each sample, without padding. Memory is the
peak of a step above weights, gradients and the two moments of AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launcher"), str(ROOT / "benchmarks")]

from post_training_samples import SHAPES, record, training_flops  # noqa: E402
from post_training_step import Gate  # noqa: E402

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}
"""Dense bfloat16, by data sheet."""
SIDES = ("trl", "rlmesh")


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The counted steps of each side."""
    shape = replace(SHAPES[args.shape], micro_batch=args.micro_batch or SHAPES[args.shape].micro_batch)
    sides = [side for side in SIDES if args.only in (None, side)]
    total, deadline = args.skip + args.steps, time.monotonic() + args.minutes * 60
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        gates, workers = {}, {}
        for side in sides:
            folder = Path(directory) / side
            folder.mkdir()
            gates[side] = Gate(folder)
            job = {
                "side": side, "folder": str(folder), "shape": asdict(shape), "steps": total, "device": args.device,
                "threads": args.threads, "liger": args.liger, "end_to_end": args.end_to_end,
                "token_budget": args.token_budget, "activation_checkpointing": args.activation_checkpointing,
            }  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the side that waits uses no core
            workers[side] = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks" / "post_training_step.py"), json.dumps(job)],
                env=environment,
                stdout=None if args.verbose else (folder / "out.txt").open("w"),
                stderr=subprocess.STDOUT if not args.verbose else None,
            )
        try:
            for step in range(total):
                if time.monotonic() > deadline and found[sides[-1]]:
                    break
                for side in sides:
                    gates[side].open(step)
                    seen = gates[side].result(step, workers[side])
                    if step >= args.skip:
                        found[side].append(seen)
                    sys.stderr.write(f"{side} {step}: {seen['step_s']:.2f} s\n")
        except RuntimeError as error:
            for side in sides:
                out = gates[side].folder / "out.txt"
                print(f"--- {side}\n{out.read_text()[-3000:] if out.exists() else ''}", flush=True)
            raise SystemExit(str(error)) from error
        finally:
            for gate in gates.values():
                gate.end()
            for worker in workers.values():
                try:
                    worker.wait(60)
                except subprocess.TimeoutExpired:
                    worker.kill()
    return found


def median(found: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(seen[name] for seen in found))


def report(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    shape = SHAPES[args.shape]
    steps = len(next(iter(found.values())))
    batches = record(shape, args.skip + args.steps)[args.skip : args.skip + steps]
    tokens = statistics.median(batch.tokens for batch in batches)
    what = "end to end" if args.end_to_end else "training phase on recorded samples"
    print(
        f"{what}, shape {args.shape}: {shape.prompts} prompts of {shape.prompt_tokens} × {shape.samples} samples",
        end="",
    )
    print(f", responses of at most {shape.response_tokens} tokens; {steps} steps of each side in turns")
    first = next(iter(found.values()))[0]
    print(f"{first['machine']}, {args.threads} threads each, {first['dtypes']}")
    print(f"\n{'medians':32}" + "".join(f"{side:>12}" for side in found) + f"{'ratio':>9}")

    def row(label: str, name: str, form: str = ".2f", *, scale: float = 1.0, inverse: bool = False) -> None:
        if not all(name in seen for each in found.values() for seen in each):
            return
        values = {side: median(each, name) * scale for side, each in found.items()}
        ratio = ""
        if len(values) == 2:
            pairs = [a[name] / b[name] for a, b in zip(found["trl"], found["rlmesh"], strict=True) if b[name]]
            each = statistics.median(pairs) if pairs else float("nan")
            ratio = f"{1 / each if inverse and each else each:9.2f}"
        print(f"{label:32}" + "".join(f"{value:>12{form}}" for value in values.values()) + ratio)

    row("step, s", "step_s", ".3f")
    if args.end_to_end:
        row("samples/s", "samples_per_s", ".2f", inverse=True)
        row("response tokens", "response_tokens", ".0f", inverse=True)
    else:
        for each in found.values():
            for seen, batch in zip(each, batches, strict=True):
                seen["tokens_per_s"] = batch.tokens / seen["step_s"]
                seen["flops"] = training_flops(shape, batch) / seen["step_s"]
        row("useful tokens/s", "tokens_per_s", ".0f", inverse=True)
        row("useful TFLOP/s", "flops", ".3f", scale=1e-12, inverse=True)
        peak = next((p for name, p in PEAK_FLOPS.items() if name in first["machine"]), None)
        if peak:
            row("MFU, %", "flops", ".1f", scale=100 / peak, inverse=True)
        print(f"{'useful tokens of a step':32}{tokens:>12.0f}")
    row("memory above state, MiB", "above_MiB", ".0f", inverse=True)
    row("state, MiB", "state_MiB", ".0f", inverse=True)
    phases = sorted({name for seen in found.get("rlmesh", []) for name in seen.get("phases", {})})
    if phases:
        each = found["rlmesh"]
        print("\nphases of a step of rlmesh, medians in ms and share")
        for name in [*phases, "other"]:
            spent = [
                seen["phases"].get(name, 0.0) if name != "other" else seen["step_s"] - sum(seen["phases"].values())
                for seen in each
            ]
            share = statistics.median(s / seen["step_s"] for s, seen in zip(spent, each, strict=True))
            print(f"  {name:30}{statistics.median(spent) * 1000:>12.1f}{share:>12.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], default="135m")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--end-to-end", action="store_true", help="with sampling, by transformers engines")
    parser.add_argument("--only", choices=SIDES, help="one side alone")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each side")
    parser.add_argument("--skip", type=int, default=1, help="steps before those")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further step after this time")
    parser.add_argument("--threads", type=int, default=2, help="of each side")
    parser.add_argument("--token-budget", type=int, default=8192, help="of a pack of rlmesh")
    parser.add_argument("--micro-batch", type=int, help="rows of a pass of TRL; by default that of the shape")
    parser.add_argument("--liger", action="store_true", help="TRL with use_liger_kernel")
    parser.add_argument("--activation-checkpointing", action="store_true", help="in the layers, on both sides")
    parser.add_argument("--json", type=Path, help="write the steps' figures")
    parser.add_argument("--verbose", action="store_true", help="show the output of both sides")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; {' '.join(sys.argv[1:])}", flush=True)
    found = measure(args)
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")
    report(args, found)


if __name__ == "__main__":
    main()
