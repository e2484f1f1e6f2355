"""Weight sync, with the floor of the hardware in the same run.

python benchmarks/weights.py              all rows that this machine can do
python benchmarks/weights.py --json       one JSON object per row
python benchmarks/weights.py --cpu        those of the CPU only
python benchmarks/weights.py --scale 0.1  smaller models, to try it out
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launcher"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from weights_floor import Shapes, copy_and_sum_beside, copy_in_memory, copy_to_process  # noqa: E402
from weights_member import KEY, MemberSpec, Tensors  # noqa: E402
from weights_member import main as member_main  # noqa: E402

from rlmesh import ModuleSource, RoleGroup, Runtime, WeightSync  # noqa: E402
from rlmesh.runtime.connections.address_book import AddressBook, MemberAddress  # noqa: E402

GIB = 1 << 30
BUCKET_GPU = 2 * GIB
WARM_UP = 4


def model_7b(scale: float) -> Shapes:
    """The 339 tensors of a dense 7B model (hidden 3584, 28 layers, vocabulary 152,064): 15.2 GB in bfloat16."""
    hidden, inner, vocabulary, layers, key_value = 3584, 18944, int(152064 * scale), max(1, round(28 * scale)), 512
    shapes: list[tuple[int, ...]] = [(vocabulary, hidden)]
    for _ in range(layers):
        shapes += [(hidden, hidden), (hidden,), (key_value, hidden), (key_value,), (key_value, hidden), (key_value,)]
        shapes += [(hidden, hidden), (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    return (*shapes, (hidden,), (vocabulary, hidden))


class Job:
    """Sources and sinks in processes of their own, and the sync between them."""

    def __init__(self, specs: list[MemberSpec], socket_dir: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for spec in specs:
            mine, theirs = context.Pipe()
            process = context.Process(target=member_main, args=(spec, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        members = []
        for spec, pipe in zip(specs, self.pipes, strict=True):
            endpoint, pid = pipe.recv()
            members.append(MemberAddress(spec.role, spec.rank, 0, endpoint, pid=pid))
        self.caller = Runtime.start(name="caller", key=KEY, socket_dir=socket_dir, bind=False)
        book = AddressBook(1, tuple(members))
        self.caller.set_address_book(book)
        self.ask("book", book)
        while self.caller._calls.peers.book is None:
            time.sleep(0.001)

    def ask(self, *message: Any, roles: slice = slice(None)) -> list[Any]:
        for pipe in self.pipes[roles]:
            pipe.send(message)
        return [pipe.recv() for pipe in self.pipes[roles]]

    def sync(self, source: ModuleSource | None = None, **options: Any) -> WeightSync:
        """From the job's sources, or from this process."""
        groups = [RoleGroup[Any](role, runtime=self.caller) for role in ("SOURCE", "SINK")]
        return WeightSync(source or groups[0], groups[1], **options)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
        self.caller.close()


@contextmanager
def running(specs: list[MemberSpec]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="rlm-") as folder:
        job = Job([replace(spec, socket_dir=folder) for spec in specs], folder)
        try:
            yield job
        finally:
            job.close()


def pushes(job: Job, times: int, *, source: ModuleSource | None = None, **options: Any) -> tuple[dict[str, float], str]:
    """Median seconds of steady pushes, and the plan. The first four are warm-up: two for each of a `double_buffer`
    sink's memories, one that finds out where everything is and one that prepares its copies."""
    with job.sync(source, **options) as sync:
        reports = [sync.push(version).result() for version in range(times + WARM_UP)]
        plan = str(sync.plan())
    steady = reports[WARM_UP:]
    return {
        "seconds": statistics.median(r.seconds for r in steady),
        "staged_s": statistics.median(r.staged_s for r in steady),
        "captured_s": statistics.median(r.captured_s for r in steady),
        "first_s": reports[0].seconds,
        "nbytes": steady[0].nbytes,
    }, plan


class Rows:
    """Prints what was measured, beside the floor and the goal."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def head(self, **facts: Any) -> None:
        print(
            json.dumps({"what": "machine", **facts})
            if self.as_json
            else ", ".join(f"{k} {v}" for k, v in facts.items())
        )

    def row(self, what: str, seconds: float, *, floor_s: float = 0.0, goal: str = "", **more: Any) -> None:
        if self.as_json:
            print(json.dumps({"what": what, "seconds": seconds, "floor_s": floor_s, "goal": goal, **more}), flush=True)
            return
        floor = f"  floor {1000 * floor_s:8.2f} ms" if floor_s else ""
        rest = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in more.items()
        )
        print(f"{what:66s} {1000 * seconds:9.2f} ms{floor}  {'goal ' + goal if goal else ''}  {rest}", flush=True)


def cpu_rows(rows: Rows, scale: float, times: int) -> None:
    count = max(1, round(64 * scale))
    shapes: Shapes = ((2048, 2048),) * count
    nbytes = count * 2048 * 2048 * 4
    plain_s = copy_in_memory(nbytes, 3)
    kept_s = copy_and_sum_beside(nbytes, 3, copying=1, summing=1)
    copied_s = copy_and_sum_beside(nbytes, 3, copying=3, summing=0)
    rows.row("floor: one copy on one core", plain_s)
    rows.row("floor: a copy with checksum and a checksum side by side", kept_s)
    rows.row("floor: three copies with checksums side by side", copied_s)
    base = MemberSpec("SOURCE", 0, "", shapes, "float32", "cpu")

    def sinks(mode: Any = "double_buffer", keep: bool = True) -> list[MemberSpec]:
        return [replace(base, role="SINK", rank=rank, mode=mode, keep_shared=keep) for rank in (0, 1)]

    variants: list[tuple[str, list[MemberSpec], dict[str, Any], str]] = [
        ("CPU, shared memory, 2 sinks, double_buffer", sinks(), {}, "≥ 5 GB/s per sink"),
        ("the same without checksums", sinks(), {"verify": False}, ""),
        ("the same, snapshotted source", sinks(), {"snapshot": True}, ""),
        ("CPU, shared memory, 2 sinks, in_place", sinks("in_place"), {}, ""),
        ("CPU, stream, 2 sinks, in_place", sinks("in_place"), {"channel": "stream"}, ""),
        ("CPU, Gloo broadcast, 2 sinks, in_place", sinks("in_place"), {"channel": "collective"}, ""),
    ]
    for what, targets, options, goal in variants:
        with running([base, *targets]) as job:
            got, _ = pushes(job, times, **options)
        rate = got["nbytes"] / got["seconds"] / 1e9
        # Sinks that keep the memory sum a half each; those that copy, all of it.
        limit_s = copied_s if targets[0].mode == "in_place" else kept_s if options.get("verify", True) else plain_s
        rows.row(what, got["seconds"], floor_s=limit_s, goal=goal, GB_per_s_per_sink=rate,
                 ratio=got["seconds"] / limit_s, captured_s=got["captured_s"], GiB=got["nbytes"] / GIB)  # fmt: skip


def gpu_rows(rows: Rows, scale: float, times: int) -> None:
    shapes = model_7b(scale)
    same_s = copy_to_process(shapes, 0, times)
    rows.row("floor: 339 tensors to another process, same GPU", same_s)
    spec = MemberSpec("SOURCE", 0, "", shapes, "bfloat16", "cuda:0")
    sink = replace(spec, role="SINK")
    options: dict[str, Any] = {"bucket_bytes": BUCKET_GPU}
    mine = ModuleSource(Tensors(spec, filled=True))

    def phases(got: dict[str, float]) -> dict[str, Any]:
        return {f"{name}_ms": 1000 * got[f"{name}_s"] for name in ("captured", "staged")}

    with running([sink]) as job:
        plain, plan = pushes(job, times, source=mine, verify=False, **options)
        rows.row("same GPU, two processes, fenced, double_buffer", plain["seconds"], floor_s=same_s, goal="≤ 13 ms",
                 **phases(plain), plan=plan)  # fmt: skip
        summed, _ = pushes(job, times, source=mine, **options)
        rows.row("the same with checksums", summed["seconds"], floor_s=same_s, goal="≤ 1.3 × if fused, else ≤ 1.6 ×",
                 ratio=summed["seconds"] / plain["seconds"], **phases(summed))  # fmt: skip
        copied, _ = pushes(job, times, source=mine, verify=False, snapshot=True, **options)
        rows.row("the same with a snapshot", copied["seconds"], floor_s=2 * same_s, goal="≤ 24 ms", **phases(copied))
        copied, _ = pushes(job, times, source=mine, snapshot=True, **options)
        rows.row("the same with a snapshot and checksums", copied["seconds"], floor_s=2 * same_s, **phases(copied))
    peer_s = 0.0
    if torch.cuda.device_count() > 1:
        peer_s = copy_to_process(shapes, 1, times)
        rows.row("floor: to a process on another GPU", peer_s)
        with running([replace(sink, device="cuda:1")]) as job:
            peer, plan = pushes(job, times, source=mine, verify=False, **options)
            rows.row("another GPU, two processes, fenced, double_buffer", peer["seconds"], floor_s=peer_s,
                     goal="≤ 48 ms", **phases(peer), plan=plan)  # fmt: skip
            summed, _ = pushes(job, times, source=mine, **options)
            rows.row("the same with checksums", summed["seconds"], floor_s=peer_s,
                     ratio=summed["seconds"] / peer["seconds"], **phases(summed))  # fmt: skip
            copied, _ = pushes(job, times, source=mine, snapshot=True, **options)
            rows.row("the same with a snapshot and checksums", copied["seconds"], floor_s=peer_s, **phases(copied))
            spread, plan = pushes(job, times, source=mine, verify=False, channel="collective", **options)
            rows.row("the same by NCCL", spread["seconds"], floor_s=peer_s, plan=plan)
    del mine
    torch.cuda.empty_cache()
    with running([spec, sink]) as job:
        apart, _ = pushes(job, times, verify=False, **options)
        rows.row("same GPU, fenced, commanded by a third process", apart["seconds"], floor_s=same_s, **phases(apart))
    sharded_rows(rows, spec, same_s, peer_s, times)


def sharded_rows(rows: Rows, source: MemberSpec, copy_s: float, peer_s: float, times: int) -> None:
    """From two FSDP2 ranks to two sinks: on the same GPUs, and on two more. The limit is the fastest all-gather that
    NCCL does here, and a copy; on other GPUs, where all bytes come over NVLink, that of a copy from another GPU."""
    ranks = [replace(source, rank=rank, device=f"cuda:{rank}", ranks=2) for rank in (0, 1)]
    for first, what, goal in ((0, "the same two GPUs", "≤ 1.15 × floor"), (2, "two other GPUs", "≤ 1.25 × floor")):
        if torch.cuda.device_count() < first + 2:
            return
        sinks = [
            replace(source, role="SINK", rank=rank, device=f"cuda:{first + rank}", mode="in_place") for rank in (0, 1)
        ]
        with running([*ranks, *sinks]) as job:
            gather_s = max(job.ask("all_gather", GIB, times, roles=slice(0, 2)))
            by_tensor_s = max(job.ask("gather", times, roles=slice(0, 2)))
            before = job.ask("memory", roles=slice(0, 4))
            got, plan = pushes(job, times, verify=False, bucket_bytes=GIB)
            summed, _ = pushes(job, times, bucket_bytes=GIB)
            more = [after - was for after, was in zip(job.ask("memory", roles=slice(0, 4)), before, strict=True)]
        limit_s = gather_s + copy_s if first == 0 else peer_s
        rows.row(
            f"2 FSDP2 ranks to 2 in_place sinks on {what}", got["seconds"], floor_s=limit_s, goal=goal,
            ratio=got["seconds"] / limit_s, all_gather_s=gather_s, full_tensor_s=by_tensor_s,
            more_GiB=max(more) / GIB, plan=plan,
        )  # fmt: skip
        rows.row("the same with checksums", summed["seconds"], floor_s=limit_s, ratio=summed["seconds"] / limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure weight sync beside the floor of the hardware.")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--cpu", action="store_true", help="rows of the CPU only")
    parser.add_argument("--gpu", action="store_true", help="rows of the GPU only")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the models' size")
    parser.add_argument("--times", type=int, default=7, help="pushes per row, after two to warm up")
    args = parser.parse_args()
    rows = Rows(args.json)
    has_gpu = torch.cuda.is_available()
    card = torch.cuda.get_device_name(0) if has_gpu else "none"
    rows.head(cpus=os.cpu_count(), GPUs=torch.cuda.device_count() if has_gpu else 0, card=card, torch=torch.__version__)
    if not args.gpu:
        cpu_rows(rows, args.scale, args.times)
    if has_gpu and not args.cpu:
        gpu_rows(rows, args.scale, args.times)


if __name__ == "__main__":
    main()
