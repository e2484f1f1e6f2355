"""The pipelines beside each other on two GPUs: colocated, separated, one-step-off, async.

python benchmarks/pipelines_gpu.py                                    a model of the 0.5b shape on two GPUs
python benchmarks/pipelines_gpu.py --device cpu --shape check …       the same job, to try the program

Both sides really compute: an actor trains, engines of transformers sample with continuous batching. Only the lengths of
the responses are drawn beforehand (log-normal, sigma 1, cut off at 8 times the median), since a model of random weights
never ends one. The passes of training over a batch are chosen so that training takes about as long as sampling in the
separated synchronous pipeline. Colocated, two ranks and two engines share both GPUs and take turns; in the others, one
GPU trains and one samples. The first steps, and the last, which saves a checkpoint, are not counted. A side is busy
while it computes a call: the engine, while it has requests.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipelines import MeasuredPipeline, QuietTrainer, even
from post_training_samples import SHAPES, Shape, build_model, build_tokenizer

from rlmesh import RLJobBuilder, current_worker, rpc
from rlmesh.rl.algorithms import GRPO
from rlmesh.rl.engines.rollout import Sample, SamplingParams
from rlmesh.rl.engines.transformers import TransformersEngine
from rlmesh.rl.rewards import Reward
from rlmesh.rl.roles.actor import ActorRole
from rlmesh.rl.roles.rollout import RolloutRole
from rlmesh.rl.trainers.settings import ActorSettings, RolloutSettings

SIGMA, MOST_TIMES = 1.0, 8
LEFT_OUT = 2
PERIOD_S = 0.1


def length_of(seed: int, median: int) -> int:
    """The recorded length of a response."""
    drawn = median * np.exp(SIGMA * np.random.default_rng(seed).standard_normal())
    return int(np.clip(drawn, 2, MOST_TIMES * median))


@dataclass(frozen=True)
class GpuPipeline(MeasuredPipeline):
    """A run whose responses have recorded lengths.

    Attributes:
        median: of the lengths, in tokens.
        colocated: actor and engines share their devices.
    """

    median: int = 32
    colocated: bool = False


class Busy:
    """Writes a process's busy seconds down, ten times a second."""

    def __init__(self) -> None:
        worker = current_worker()
        self.total, self._since = 0.0, 0.0
        self._file = Path(worker.run_dir) / f"busy-{worker.name}.jsonl"

    def start(self, total: Any) -> None:
        """Begin to write ``total()``."""

        def write() -> None:
            with self._file.open("a", buffering=1) as file:
                while True:
                    file.write(json.dumps([time.time(), total()]) + "\n")
                    time.sleep(PERIOD_S)

        threading.Thread(target=write, daemon=True).start()

    def now(self) -> float:
        """The seconds of all spans, and of the one that lasts."""
        since = self._since
        return self.total + (time.monotonic() - since if since else 0.0)

    @contextmanager
    def span(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            ended, self._since = time.monotonic() - self._since, 0.0
            self.total += ended


class TailEngine(TransformersEngine):
    """Ends each response at its recorded length."""

    median = 0

    def submit_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, timeout_s: float = 600.0
    ) -> list[Future[Sample]]:
        cut = [replace(own, max_tokens=length_of(own.seed or 0, self.median)) for own in params]
        return super().submit_all(prompts, cut, timeout_s=timeout_s)


class TailRollout(RolloutRole):
    """An engine of half precision on a GPU."""

    def make_engine(self) -> Any:
        from transformers import AutoModelForCausalLM

        settings: Any = self.run_settings
        gpu = bool(settings.devices_per_node)
        device = torch.device("cuda" if gpu else "cpu")
        dtype = getattr(torch, settings.rollout.dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval().to(device)
        mode: dict[str, Any] = {"mode": "in_place"} if self.turns.leased else {}
        if not settings.schedule.drains:
            mode |= {"pause_mode": "keep", "keep_cache": True}
        engine = TailEngine(model, max_batch=256, **mode)
        engine.median = settings.median
        Busy().start(lambda: engine.metrics()["generating_s"])
        return engine


class TailActor(ActorRole):
    """The actor, which measures its calls."""

    def setup(self) -> None:
        super().setup()
        self.busy = Busy()
        self.busy.start(self.busy.now)

    @rpc
    def log_probs(self, packs: Any, version: int) -> Any:
        with self.busy.span():
            return super().log_probs(packs, version)

    @rpc
    def update(self, shares: Any, version: int) -> Any:
        with self.busy.span():
            found = super().update(shares, version)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return found


def prepare(folder: Path, shape: Shape) -> Path:
    """Save a model of random weights, and its tokenizer."""
    build_model(shape, dtype=torch.bfloat16).save_pretrained(folder)
    build_tokenizer(shape).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Seen:
    """Means of the counted steps.

    Attributes:
        step_s: seconds of a step.
        sampling_s: seconds that the trainer waits for samples.
        busy: share of its time that each process computes.
        tokens: response tokens per step.
        staleness: mean number of versions between sampling and training.
        parts: every metric of the trainer that is in seconds.
    """

    step_s: float
    sampling_s: float
    busy: dict[str, float]
    tokens: float
    staleness: float
    parts: dict[str, float]

    def actor_s(self) -> float:
        """Seconds of a step in which the actor computes."""
        return self.step_s * max(share for name, share in self.busy.items() if name.startswith("ACTOR"))


def measure(base: Path, run: GpuPipeline) -> Seen:
    """Carry out a run."""
    gpu, members = bool(run.devices_per_node), 2 if run.colocated else 1
    run = replace(
        run, actor=replace(run.actor, ranks=members), rollout=replace(run.rollout, engines=members),
        placement="shared" if run.colocated else "separate",
    )  # fmt: skip
    builder = RLJobBuilder().config(run).node_num(1).device_type("GPU" if gpu else "CPU").device_per_node(2)
    builder.trainer(QuietTrainer).resource(cpu=1)
    builder.actor(TailActor).resource(accelerator=1).nnodes(1).nproc_per_node(members)
    builder.rollout(TailRollout).resource(accelerator=1).total(members)
    if run.colocated:
        builder.with_collocation("ACTOR", "ROLLOUT")
    with chdir(base):  # not a LocalCluster, whose devices are virtual: members would see all GPUs
        result = builder.build().submit("pipelines", view="none")
    folder = Path(result.run_dir)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["role"] == "TRAINER" and "reward_mean" in line["metrics"]}
    used = [steps[step] for step in range(LEFT_OUT, run.steps)]
    begin, end, count = used[0]["at"], used[-1]["at"], len(used) - 1

    def mean(name: str) -> float:
        return float(np.mean([line["metrics"].get(name, 0.0) for line in used[1:]]))

    busy = {}
    for file in sorted(folder.glob("busy-*.jsonl")):
        rows = np.array([json.loads(line) for line in file.read_text().splitlines() if line.endswith("]")])
        first, last = np.interp([begin, end], rows[:, 0], rows[:, 1])
        busy[file.stem.removeprefix("busy-")] = float((last - first) / (end - begin))
    return Seen(
        (end - begin) / count, mean("buffer/trainer_wait_s"), busy,
        mean("response_tokens") * run.batch_size * run.algorithm.samples, mean("buffer/staleness_mean"),
        {name: mean(name) for name in used[-1]["metrics"] if name.endswith("_s")},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=16, help="of a batch")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--median", type=int, default=32, help="tokens of a response")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=0, help="prompts that the engine of async has at a time")
    parser.add_argument("--modes", help="only these, separated by commas")
    parser.add_argument("--epochs", type=int, help="passes over a batch; by default chosen as said above")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    shape, gpu = SHAPES[args.shape], args.device == "cuda"
    with tempfile.TemporaryDirectory(prefix="rlp-") as directory:
        base = Path(directory)
        words = np.random.default_rng(0).integers(
            3, shape.vocabulary - 4, (args.steps * args.prompts, args.prompt_tokens)
        )
        (base / "model").mkdir()
        run = GpuPipeline(
            model=str(prepare(base / "model", shape)),
            data=[{"prompt": " ".join(f"w{w}" for w in row)} for row in words],
            rewards=[Reward(even, inline=True)], algorithm=GRPO(samples=args.samples), steps=args.steps,
            batch_size=args.prompts, save_every=10**6, devices_per_node=2 if gpu else 0, median=args.median,
            max_prompt_tokens=args.prompt_tokens,
            actor=ActorSettings(
                lr=1e-6, token_budget=32768 if gpu else 4096, precision="bfloat16" if gpu else "float32",
                activation_checkpointing=gpu, epochs=args.epochs or 1, threads=4 if gpu else 1,
            ),
            rollout=RolloutSettings(
                max_tokens=MOST_TIMES * args.median, dtype="bfloat16" if gpu else "float32", threads=4 if gpu else 1
            ),
        )  # fmt: skip
        where = torch.cuda.get_device_name() if gpu else "CPU"
        lengths = f"median {args.median}, at most {MOST_TIMES * args.median} tokens"
        print(f"{where}, torch {torch.__version__}; shape {args.shape}, {args.samples} responses each, {lengths}")
        print(f"{args.prompts} prompts of {args.prompt_tokens} tokens, {args.steps} steps")
        if not args.epochs:
            once = measure(base, replace(run, steps=LEFT_OUT + 4))
            rest = once.step_s - once.sampling_s - once.actor_s()
            epochs = max(1, round((once.sampling_s - rest) / once.actor_s()))
            print(
                f"one pass over a batch takes {once.actor_s():.2f} s, sampling {once.sampling_s:.2f} s: {epochs} passes"
            )
            run = replace(run, actor=replace(run.actor, epochs=epochs))
        modes = {
            "separated": run, "colocated": replace(run, colocated=True),
            "one-step-off": replace(run, pipeline="one-step-off"),
            "async": replace(
                run, pipeline=f"async(staleness={args.staleness})",
                rollout=replace(run.rollout, in_flight=args.in_flight),
            ),
        }  # fmt: skip
        if args.modes:
            modes = {name: modes[name] for name in args.modes.split(",")}
        found: dict[str, Seen] = {}
        print(f"{'mode':14}{'step, s':>9}{'tokens/s':>10}{'waits for samples, s':>22}{'staleness':>11}  idle")
        for name, one in modes.items():
            seen = found[name] = measure(base, one)
            idle = ", ".join(f"{who} {1 - share:.0%}" for who, share in seen.busy.items())
            print(f"{name:14}{seen.step_s:>9.2f}{seen.tokens / seen.step_s:>10.0f}{seen.sampling_s:>22.2f}"
                  f"{seen.staleness:>11.2f}  {idle}", flush=True)  # fmt: skip
        for name, seen in found.items():
            print(f"{name}, s: " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in sorted(seen.parts.items())))
        if {"separated", "one-step-off"} <= found.keys():
            sync = found["separated"]
            s, t = sync.sampling_s, sync.step_s - sync.sampling_s
            most = (s + t) / max(s, t)
            gain = sync.step_s / found["one-step-off"].step_s
            print(f"separated: sampling {s:.2f} s, the rest {t:.2f} s, so one-step-off can be {most:.2f} times as fast")
            print(f"it is {gain:.2f} times as fast: {gain / most:.2f} of that")
        if "async" in found:
            print(f"async: the busier side is idle {1 - max(found['async'].busy.values()):.0%} of the time")


if __name__ == "__main__":
    main()
