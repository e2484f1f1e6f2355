"""One token of many responses with the engine of transformers: CUDA graphs beside plain passes.

python benchmarks/decode_step.py                                      128 rows on a model of the 0.5b shape, on one GPU
python benchmarks/decode_step.py --device cpu --shape check --rows 8  to try the program; a CPU has no graphs

Prompts have log-normal lengths (median 200, 16 to 1,500 tokens). Three tables: the time of a step, when graphs are
recorded; a whole batch of log-normal response lengths (median 32, at most 256), twice, with the recording of graphs in
the first; greedy tokens in float32 beside ``generate`` of transformers, row by row in one batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from post_training_samples import SHAPES, Shape, build_model

from rlmesh.rl.engines.continuous import ContinuousBatch
from rlmesh.rl.engines.decode_graphs import graphs_for
from rlmesh.rl.engines.grouped_attention import use_grouped_attention
from rlmesh.rl.engines.growing import Growing
from rlmesh.rl.engines.rollout import SamplingParams

WARM_UP, STEPS = 6, 40
GREEDY_ROWS, GREEDY_TOKENS = 32, 48


def lengths(count: int, median: float, sigma: float, most: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return [int(n) for n in drawn.clip(2, most)]


def prompts_of(shape: Shape, count: int, longest: int = 1500) -> list[list[int]]:
    generator = np.random.default_rng(1)
    sizes = lengths(count, min(200, longest / 2), 0.8, longest, 0)
    return [generator.integers(3, shape.vocabulary, max(16, size)).tolist() for size in sizes]


def batch_of(model: Any, rows: list[Growing], *, graphs: bool) -> ContinuousBatch:
    batch = ContinuousBatch(model, stop_token_ids=[], most_rows=len(rows), graphs=graphs_for(model) if graphs else None)
    for row in rows:
        batch.add(row)
    return batch


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def steps(model: Any, prompts: list[list[int]], *, graphs: bool) -> tuple[list[float], list[float]]:
    """Seconds of whole steps, and of their passes alone."""
    batch = batch_of(model, [Growing(p, SamplingParams(10**6, seed=i)) for i, p in enumerate(prompts)], graphs=graphs)
    for _ in range(WARM_UP):
        batch.step(0)
    whole = [timed(lambda: batch.step(0)) for _ in range(STEPS)]
    cache: Any = batch._cache
    decode, passes = cache.decode, list[float]()

    def measured(*args: Any) -> Any:
        found: Any = None

        def one() -> None:
            nonlocal found
            found = decode(*args)

        passes.append(timed(one))
        return found

    cache.decode = measured
    for _ in range(STEPS):
        batch.step(0)
    return whole, passes


def whole_batch(model: Any, prompts: list[list[int]], graphs: Any) -> tuple[float, int]:
    """Seconds and tokens of a batch whose responses end one by one."""
    tokens = lengths(len(prompts), 32, 1.0, 256, 2)
    rows = [Growing(p, SamplingParams(n, seed=i)) for i, (p, n) in enumerate(zip(prompts, tokens, strict=True))]
    batch = ContinuousBatch(model, stop_token_ids=[], most_rows=len(rows), graphs=graphs)
    for row in rows:
        batch.add(row)

    def run() -> None:
        while batch.rows:
            batch.step(0)

    return timed(run), sum(tokens)


@torch.no_grad()
def greedy(model: Any, prompts: list[list[int]], *, graphs: bool) -> str:
    """How many rows have the tokens of ``generate``, and the gap of the two likeliest tokens where one differs."""
    rows = [Growing(prompt, SamplingParams(GREEDY_TOKENS, temperature=0)) for prompt in prompts]
    batch = batch_of(model, rows, graphs=graphs)
    while batch.rows:
        batch.step(0)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    attend = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    wanted = model.generate(
        input_ids=ids, attention_mask=attend, max_new_tokens=GREEDY_TOKENS, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )[:, width:].tolist()  # fmt: skip
    gaps = []
    for row, other in zip(rows, wanted, strict=True):
        if row.tokens != other:
            place = next(i for i, (a, b) in enumerate(zip(row.tokens, other, strict=True)) if a != b)
            context = torch.tensor([row.prompt + row.tokens[:place]], device=model.device)
            first, second = model(input_ids=context, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
            gaps.append(first - second)
    told = f"; the two likeliest tokens are {max(gaps):.1e} apart at most where another was taken" if gaps else ""
    return f"{len(rows) - len(gaps)} of {len(rows)} rows have the tokens of generate{told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5b")
    parser.add_argument("--rows", type=int, default=128)
    args = parser.parse_args()
    shape, gpu = SHAPES[args.shape], args.device == "cuda"
    model: Any = build_model(shape, dtype=torch.bfloat16 if gpu else torch.float32).to(args.device).eval()
    prompts = prompts_of(shape, args.rows, 1500 if gpu else 40)
    where = torch.cuda.get_device_name() if gpu else "CPU"
    print(f"{where}, torch {torch.__version__}; shape {args.shape}, {args.rows} rows, "
          f"prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")  # fmt: skip
    print(
        f"{'':16}{'step, ms':>12}{'slowest':>12}{'pass, ms':>12}{'tokens/s':>12}{'whole batch, s':>18}{'again, s':>12}"
    )
    for graphs in (False, True):
        if graphs:
            use_grouped_attention(model)
        whole, passes = steps(model, prompts, graphs=graphs)
        held = graphs_for(model) if graphs else None
        (first, tokens), (again, _) = (whole_batch(model, prompts, held) for _ in range(2))
        step = statistics.median(whole)
        print(f"{'graphs' if graphs else 'plain passes':16}{1e3 * step:>12.2f}{1e3 * max(whole):>12.2f}"
              f"{1e3 * statistics.median(passes):>12.2f}{args.rows / step:>12,.0f}{first:>18.2f}{again:>12.2f}",
              flush=True)  # fmt: skip
        if held is not None:
            print(f"{held.count} graphs, {'in use' if held.works else 'refused'}; a batch has {tokens:,} tokens")
    model = model.float()
    for graphs in (False, True):
        print(
            f"{'graphs' if graphs else 'plain passes'}, float32: {greedy(model, prompts[:GREEDY_ROWS], graphs=graphs)}"
        )


if __name__ == "__main__":
    main()
