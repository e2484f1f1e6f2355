"""What the links between four GPUs carry when two sources send halves of a model to two sinks: `python links.py`.

GPUs 0 and 1 have half of each tensor of a 7B model each; GPUs 2 and 3 copy both halves. The patterns differ in who
copies from whom at the same time; all copies are torch's, between pieces of the same sizes as in `weights.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launcher"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from weights import model_7b  # noqa: E402

TIMES = 7
Flow = tuple[int, int]
"""Source and sink."""
Pattern = list[list[Flow]]
"""Flows one after the other in each list; the lists at the same time."""

PATTERNS: dict[str, Pattern] = {
    "one half: 0 to 2": [[(0, 2)]],
    "a pair, both halves: 0 to 2 twice": [[(0, 2), (0, 2)]],
    "two pairs: 0 to 2, 1 to 3": [[(0, 2), (0, 2)], [(1, 3), (1, 3)]],
    "one source, two sinks: 0 to 2, 0 to 3": [[(0, 2)], [(0, 3)]],
    "two sources, one sink: 0 to 2, 1 to 2": [[(0, 2)], [(1, 2)]],
    "all at once: each sink copies from both sources": [[(0, 2)], [(1, 2)], [(0, 3)], [(1, 3)]],
    "in turns, another source first": [[(0, 2), (1, 2)], [(1, 3), (0, 3)]],
    "in turns, the same source first": [[(0, 2), (1, 2)], [(0, 3), (1, 3)]],
}


def halves(device: int) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() // 2 for shape in model_7b(1.0)]
    return [torch.empty(size, dtype=torch.bfloat16, device=f"cuda:{device}") for size in sizes]


def seconds(pattern: Pattern, sources: dict[int, list[torch.Tensor]], sinks: dict[Flow, list[torch.Tensor]]) -> float:
    """Median time from the first copy's start to the last one's end."""
    streams = [torch.cuda.Stream(f"cuda:{flows[0][1]}") for flows in pattern]
    took = []
    for _ in range(TIMES):
        for device in range(4):
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for position in range(max(map(len, pattern))):  # so that all streams have work from the start
            for flows, stream in zip(pattern, streams, strict=True):
                if position < len(flows):
                    with torch.cuda.stream(stream):
                        for to, piece in zip(sinks[flows[position]], sources[flows[position][0]], strict=True):
                            to.copy_(piece, non_blocking=True)
        for device in range(4):
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 4:
        raise SystemExit("links.py needs four GPUs")
    sources = {rank: halves(rank) for rank in (0, 1)}
    sinks = {(source, sink): halves(sink) for source in (0, 1) for sink in (2, 3)}
    nbytes = sum(piece.nbytes for piece in sources[0])
    print(f"{torch.cuda.get_device_name(0)}, a half is {nbytes / (1 << 30):.2f} GiB in {len(sources[0])} pieces")
    for what, pattern in PATTERNS.items():
        took = seconds(pattern, sources, sinks)
        into: dict[int, int] = {}
        for _, sink in (flow for flows in pattern for flow in flows):
            into[sink] = into.get(sink, 0) + nbytes
        rates = ", ".join(f"GPU {sink} takes {size / took / 1e9:.0f} GB/s" for sink, size in into.items())
        print(f"{what:50s} {1000 * took:7.2f} ms  {rates}", flush=True)


if __name__ == "__main__":
    main()
