"""All roles of a PPO training on one GPU: memory at the peak, and the time of a switch from one role to the next.

python benchmarks/one_gpu.py                                     a model of the 0.5b shape
python benchmarks/one_gpu.py --fused                             actor, engine and reference in one process
python benchmarks/one_gpu.py --device cpu --shape check …        the same job, to try the program

Actor, critic, reference and engine are processes that share the GPU; at most one of them is awake. A switch lasts from
the moment at which one begins to sleep until the next is awake, if the next already waits; for all others, the sleep
and the wake are added. When a process has held more memory than at its sleep before, it also makes host memory as it
goes to sleep: such switches are told apart. The memory of the GPU is what its driver says, read every 20 ms, less what
was used before. It stands beside what the largest of the processes would take alone: the most that its allocator ever
held, and one CUDA context.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipelines import MeasuredPipeline, even
from post_training_samples import SHAPES, build_model, build_tokenizer

from rlmesh import RLJobBuilder, current_worker
from rlmesh.rl.algorithms import PPO
from rlmesh.rl.rewards import Reward
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.critic import CriticRole
from rlmesh.rl.roles.device_turns import DeviceTurns
from rlmesh.rl.roles.fused import ActorRolloutRef
from rlmesh.rl.roles.reference import ReferenceRole
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.trainers.settings import ActorSettings, CriticSettings, RolloutSettings

FILE = "switches.jsonl"
GIB = 1 << 30
PERIOD_MS = 20
CONTEXT = """
import torch
a = torch.ones(64, 64, device="cuda")
(a @ a).sum().item()
print("ready", torch.cuda.memory_reserved(), flush=True)
input()
"""


class TimedTurns(DeviceTurns):
    """Writes the begin and end of each wake and sleep, and the most memory that the process has held."""

    def add(self, name: str, *, wake: Callable[[], object], sleep: Callable[[], object]) -> None:
        def timed(event: str, change: Callable[[], object]) -> None:
            begin = time.monotonic()
            change()
            gpu = torch.cuda.is_available()
            if gpu:
                torch.cuda.synchronize()
            held = torch.cuda.max_memory_reserved() if gpu else 0
            line = [begin, time.monotonic(), current_worker().name, name, event, held]
            with (Path(current_worker().run_dir) / FILE).open("a") as file:
                file.write(json.dumps(line) + "\n")

        super().add(name, wake=lambda: timed("wake", wake), sleep=lambda: timed("sleep", sleep))


class Timed:
    """A role whose turns are timed."""

    def make_turns(self) -> DeviceTurns:
        return TimedTurns(leased=len(current_worker().collocated_roles) > 1)


class TimedActor(Timed, ActorRole): ...


class TimedCritic(Timed, CriticRole): ...


class TimedReference(Timed, ReferenceRole): ...


class TimedRollout(Timed, RolloutRole): ...


class TimedFused(Timed, ActorRolloutRef): ...


class MemoryReader:
    """Reads how many bytes of the first GPU are in use, until it is closed."""

    def __init__(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the reader)
        self._process = subprocess.Popen([*command, f"--loop-ms={PERIOD_MS}"], stdout=self._file)

    def close(self) -> list[int]:
        self._process.terminate()
        self._process.wait(10)
        self._file.seek(0)
        found = []
        for line in self._file:
            with suppress(ValueError):  # The last line may be cut off.
                found.append(int(line) << 20)
        self._file.close()
        return found


def context_bytes() -> int:
    """The memory that a process with CUDA takes beside its allocator's."""
    reader = MemoryReader()
    time.sleep(1.0)
    command = [sys.executable, "-c", CONTEXT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None and p.stdin is not None
        reserved = int(p.stdout.readline().split()[1])
        time.sleep(0.5)
        p.stdin.write("\n")
        p.stdin.flush()
    found = reader.close()
    return max(found) - found[0] - reserved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5b")
    parser.add_argument("--fused", action="store_true", help="actor, engine and reference are one process")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64, help="of a response")
    parser.add_argument("--token-budget", type=int, default=8192)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    shape, gpu = SHAPES[args.shape], args.device == "cuda"
    words = np.random.default_rng(0).integers(
        3, shape.vocabulary - 4, (args.steps * shape.prompts, shape.prompt_tokens)
    )
    context = context_bytes() if gpu else 0
    with tempfile.TemporaryDirectory(prefix="rlg-") as directory:
        base = Path(directory)
        (base / "model").mkdir()
        precision: Any = "bfloat16" if gpu else "float32"
        build_model(shape, dtype=getattr(torch, precision)).save_pretrained(base / "model")
        build_tokenizer(shape).save_pretrained(base / "model")
        training: dict[str, Any] = {
            "lr": 1e-6, "token_budget": args.token_budget, "precision": precision, "activation_checkpointing": gpu,
        }  # fmt: skip
        run = MeasuredPipeline(
            model=str(base / "model"), data=[{"prompt": " ".join(f"w{w}" for w in row)} for row in words],
            rewards=[Reward(even, inline=True)], algorithm=PPO(samples=shape.samples, kl=0.01), steps=args.steps,
            batch_size=shape.prompts, save_every=10**6, max_prompt_tokens=shape.prompt_tokens,
            actor=ActorSettings(**training), critic=CriticSettings(**training),
            rollout=RolloutSettings(max_tokens=args.max_tokens, dtype=precision),
        )  # fmt: skip
        builder = RLJobBuilder().config(run).node_num(1).device_type("GPU" if gpu else "CPU").device_per_node(1)
        builder.trainer().resource(cpu=1)
        builder.actor(TimedFused if args.fused else TimedActor).resource(accelerator=1)
        builder.critic(TimedCritic).resource(accelerator=1)
        roles = ["ACTOR", "CRITIC"]
        if not args.fused:
            builder.reference(TimedReference).resource(accelerator=1)
            builder.rollout(TimedRollout).resource(accelerator=1)
            roles += ["REFERENCE", "ROLLOUT"]
        builder.with_collocation(*roles)
        reader = MemoryReader() if gpu else None
        if gpu:
            time.sleep(1.0)
        with chdir(base):  # not a LocalCluster, whose devices are virtual: members would see all GPUs
            result = builder.build().submit("one-gpu", view="plain")
        used = reader.close() if reader else [0]
        lines = (Path(result.run_dir) / FILE).read_text().splitlines()
    events = sorted(tuple(json.loads(line)) for line in lines)
    where = torch.cuda.get_device_name() if gpu else "CPU"
    print(
        f"{where}, torch {torch.__version__}, {precision}; shape {args.shape}, {args.steps} steps of {shape.rows} rows"
    )
    report(events, gpu=gpu, used=max(used) - used[0], context=context)


def report(events: list[tuple[Any, ...]], *, gpu: bool, used: int, context: int) -> None:
    first: list[float] = []
    later: list[float] = []
    changes: dict[tuple[str, str, str], list[float]] = {}
    held_before: dict[tuple[str, str], int] = {}
    for (begin, asleep, who, part, one, most), (wakes, awake, *_, other, _) in itertools.pairwise(events):
        if (one, other) == ("sleep", "wake"):
            # A role that waits wakes within milliseconds; another one was asked for later.
            waited = wakes - asleep < 0.1
            switch = awake - begin if waited else asleep - begin + awake - wakes
            (first if most > held_before.get((who, part), -1) else later).append(switch)
            held_before[who, part] = max(most, held_before.get((who, part), 0))
    for begin, end, who, part, event, _ in events:
        changes.setdefault((who, part, event), []).append(end - begin)
    for name, seconds in (("that make host memory", first), ("after them", later)):
        median = statistics.median(seconds)
        print(f"{len(seconds)} switches {name}: median {median:.3f} s, longest {max(seconds):.3f} s")
    for (who, part, event), seconds in sorted(changes.items()):
        print(f"  {who} {part}: {event} {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s")
    if not gpu:
        return
    held: dict[str, int] = {}
    for *_, who, _, _, most in events:
        held[who] = max(held.get(who, 0), most)
    for who, most in sorted(held.items()):
        print(f"  {who} held at most {most / GIB:.2f} GiB")
    alone = max(held.values()) + context
    print(f"a CUDA context takes {context / GIB:.2f} GiB; the largest process alone {alone / GIB:.2f} GiB")
    print(f"peak of the GPU {used / GIB:.2f} GiB: {(used - alone) / GIB:+.2f} GiB")


if __name__ == "__main__":
    main()
