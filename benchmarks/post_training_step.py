"""One side of `post_training.py`: makes a step whenever the gate opens, and says what it took."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launcher"), str(ROOT / "benchmarks")]

END = "end"
MIB = 2**20


class Gate:
    """Steps in turns, over files: the parent opens a step, the worker answers with its figures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, step: int) -> None:
        (self.folder / f"go-{step}").touch()

    def end(self) -> None:
        (self.folder / END).touch()

    def wait(self, step: int) -> bool:
        """Wait for the step; False: there will be none."""
        while not (self.folder / f"go-{step}").exists():
            if (self.folder / END).exists():
                return False
            time.sleep(0.005)
        return True

    def done(self, step: int, figures: dict[str, Any]) -> None:
        aside = self.folder / f"aside-{step}"
        aside.write_text(json.dumps(figures))
        aside.rename(self.folder / f"done-{step}")

    def result(self, step: int, worker: subprocess.Popen[bytes]) -> dict[str, Any]:
        file = self.folder / f"done-{step}"
        while not file.exists():
            if worker.poll() is not None and not file.exists():
                raise RuntimeError(f"a side ended with {worker.returncode} before step {step}")
            time.sleep(0.005)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


class Memory:
    """The peak of a step above weights, gradients and the moments of AdamW."""

    def __init__(self, device: str) -> None:
        self.device, self.state, self.base = device, 0, 0
        gc.collect()
        if device == "cpu":
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            self.base = self._status("VmRSS")

    def model(self, model: Any) -> None:
        self.state = sum(p.numel() * p.element_size() for p in model.parameters()) * 4

    def begin(self) -> None:
        if self.device == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        else:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def figures(self) -> dict[str, float]:
        if self.device == "cpu":
            peak = self._status("VmHWM") - self.base
        else:
            import torch

            peak = torch.cuda.max_memory_allocated()
        return {"above_MiB": (peak - self.state) / MIB, "state_MiB": self.state / MIB}

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def about(device: str, dtype: str) -> dict[str, str]:
    import torch

    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"machine": f"{machine}, torch {torch.__version__}", "dtypes": f"weights, gradients and moments in {dtype}"}


def trl_side(job: dict[str, Any], gate: Gate) -> None:
    import torch
    from post_training_samples import SHAPES, Shape, build_model, record
    from post_training_trl import Settings, TrlRun

    torch.set_num_threads(job["threads"])
    shape, device = Shape(**job["shape"]), job["device"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    settings = Settings("dapo", lr=1e-6, activation_checkpointing=job["activation_checkpointing"])
    options: dict[str, Any] = {"use_liger_kernel": True} if job["liger"] else {}
    if job["end_to_end"]:
        options |= {"disable_dropout": True}
    small = SHAPES["check"]
    TrlRun(build_model(small), small, record(small, 1), settings, device=device).train()  # loads all libraries
    memory = Memory(device)
    model = build_model(shape, dtype=dtype)
    if job["end_to_end"]:
        from post_training_job import set_ends

        set_ends(model, shape)
    memory.model(model)
    batches = record(shape, job["steps"])
    run = TrlRun(
        model, shape, batches, settings, device=device, own_sampling=job["end_to_end"],
        reward=reward if job["end_to_end"] else None, **options,
    )  # fmt: skip
    generated = [0.0, 0]
    inner = run.trainer._generate

    def generate(*args: Any) -> Any:
        synchronize(device)
        began = time.perf_counter()
        result = inner(*args)
        synchronize(device)
        generated[0] += time.perf_counter() - began
        generated[1] += sum(map(len, result[1]))
        return result

    run.trainer._generate = generate
    dtypes = str(dtype).removeprefix("torch.")
    began = 0.0

    def begin(step: int) -> None:
        nonlocal began
        if not gate.wait(step):
            raise SystemExit(0)
        generated[:] = [0.0, 0]
        synchronize(device)
        memory.begin()
        began = time.perf_counter()

    def on_step(count: int) -> None:
        synchronize(device)
        spent = time.perf_counter() - began
        whole = job["end_to_end"]
        gate.done(
            count - 1,
            about(device, dtypes) | memory.figures() | {
                "step_s": spent if whole else spent - generated[0], "generate_s": generated[0],
                "samples_per_s": shape.rows / spent, "response_tokens": generated[1],
            },
        )  # fmt: skip
        if count < job["steps"]:
            begin(count)

    run.on_step = on_step
    begin(0)
    run.train()


def reward(ids: list[int]) -> float:
    """Something that every response has: the share of even ids."""
    return sum(i % 2 == 0 for i in ids) / max(len(ids), 1)


def rlmesh_side(job: dict[str, Any], gate: Gate) -> None:
    import torch
    from post_training_rlmesh import LocalRun, groups_of
    from post_training_samples import SHAPES, Shape, build_model, record
    from post_training_trl import Settings

    from rlmesh.rl.roles.defaults import keep_objects

    torch.set_num_threads(job["threads"])
    shape, device = Shape(**job["shape"]), job["device"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    settings = Settings("dapo", lr=1e-6, activation_checkpointing=job["activation_checkpointing"])
    small = SHAPES["check"]
    warm = LocalRun(build_model(small).to(device), small.samples, small.response_tokens, settings)
    warm.step(record(small, 1)[0])
    memory = Memory(device)
    model = build_model(shape, dtype=dtype).to(device)
    memory.model(model)
    run = LocalRun(model, shape.samples, shape.response_tokens, settings, token_budget=job["token_budget"])
    phases = run.actor.time_phases(lambda: synchronize(device))
    dtypes = str(dtype).removeprefix("torch.")
    keep_objects()  # as roles do at the end of their set-up
    for step, batch in enumerate(record(shape, job["steps"])):
        if not gate.wait(step):
            return
        groups = groups_of(batch)  # stands for sampling, which is not measured on the side of TRL either
        phases.clear()
        synchronize(device)
        memory.begin()
        began = time.perf_counter()
        run.train(groups)
        synchronize(device)
        spent = time.perf_counter() - began
        gate.done(step, about(device, dtypes) | memory.figures() | {"step_s": spent, "phases": dict(phases)})


SIDES: dict[tuple[str, bool], Callable[[dict[str, Any], Gate], None]] = {
    ("trl", False): trl_side,
    ("trl", True): trl_side,
    ("rlmesh", False): rlmesh_side,
}


def main() -> None:
    job = json.loads(sys.argv[1])
    gate = Gate(Path(job["folder"]))
    if job["side"] == "rlmesh" and job["end_to_end"]:
        from post_training_job import whole_job

        whole_job(job, gate)
    else:
        SIDES[job["side"], job["end_to_end"]](job, gate)


if __name__ == "__main__":
    main()
