"""A push of a LoRA adapter beside a push of all weights.

python benchmarks/adapter_push.py                             rank 16 on a model of the 0.5b shape, on one GPU
python benchmarks/adapter_push.py --device cpu --shape check  to try the program

A trainer and an engine of transformers are processes that share the GPU. The trainer changes the adapter and pushes it,
30 times; then both do the same with all weights, without an adapter. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from post_training_samples import SHAPES, Shape, build_model

from rlmesh import DLJobBuilder, ModuleSource, ReceivesWeights, RoleGroup, WeightSync, current_worker, rpc
from rlmesh.rl.engines.lora import LoraOptions, add_adapter
from rlmesh.rl.engines.transformers import TransformersEngine
from rlmesh.testing import LocalCluster

PUSHES, WARM_UP = 30, 5


def options() -> dict[str, Any]:
    config: dict[str, Any] = current_worker().job_info.user_config
    return config


def model_here() -> Any:
    """The model that trainer and engine begin with."""
    config = options()
    device = config["device"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return build_model(Shape(**config["shape"]), dtype=dtype).to(device)


class Engine(ReceivesWeights):
    """An engine that waits for weights."""

    def setup(self) -> None:
        lora = LoraOptions(rank=16) if options()["lora"] else None
        self.engine = TransformersEngine(model_here(), lora=lora)
        self.receive_weights(self.engine.sink)

    @rpc
    def norm(self) -> float:
        """The norm of the trained weights that the engine has."""
        return norm_of(self.engine.model, lora=options()["lora"])

    def teardown(self) -> None:
        self.close_weights()
        self.engine.close()


class Pusher:
    """Changes the weights and pushes them."""

    def run(self) -> None:
        lora = options()["lora"]
        model = add_adapter(model_here(), LoraOptions(rank=16)) if lora else model_here()
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = RoleGroup("ENGINE")
        sync = WeightSync(ModuleSource(model, lora="adapter" if lora else ""), engine)
        times, nbytes = [], 0
        for version in range(1, PUSHES + WARM_UP + 1):
            with torch.no_grad():
                torch._foreach_add_(trained, 1e-3)
            report = sync.push(version).result(60)
            times.append(report.seconds)
            nbytes = report.nbytes
        own = norm_of(model, lora=lora)
        (theirs,) = engine.call("norm").result(60)
        if abs(theirs - own) > 1e-5 * own:
            raise SystemExit(f"the engine has other weights than the trainer: {theirs} instead of {own}")
        sync.close()
        Path(options()["result"]).write_text(json.dumps([nbytes, *times[WARM_UP:]]))


def norm_of(model: Any, *, lora: bool) -> float:
    named = ((name, p) for name, p in model.named_parameters() if "lora_" in name or not lora)
    return float(torch.stack([p.detach().double().norm() for _, p in sorted(named)]).norm())


def measure(folder: Path, args: argparse.Namespace, *, lora: bool) -> tuple[int, list[float]]:
    """Bytes of a push, and seconds of each."""
    result = folder / f"{lora}.json"
    config = {"device": args.device, "shape": SHAPES[args.shape].__dict__, "lora": lora, "result": str(result)}
    gpu = args.device == "cuda"
    builder = DLJobBuilder().config(config).device_type("GPU" if gpu else "CPU").device_per_node(1)
    builder.role("PUSHER").run(Pusher).resource(accelerator=1)
    builder.role("ENGINE").run(Engine).resource(accelerator=1)
    builder.with_collocation("PUSHER", "ENGINE")
    with LocalCluster(run_root=folder):
        builder.build().submit("adapter", view="none")
    nbytes, *times = json.loads(result.read_text())
    return nbytes, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5b")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; shape {args.shape}, {PUSHES} pushes of each")
    with tempfile.TemporaryDirectory(prefix="rla-") as directory:
        found = {lora: measure(Path(directory), args, lora=lora) for lora in (True, False)}
    for lora, (nbytes, times) in found.items():
        what = "adapter of rank 16" if lora else "all weights"
        print(f"{what:20}{nbytes / 2**20:>10.1f} MiB{1e3 * statistics.median(times):>10.2f} ms  "
              f"(fastest {1e3 * min(times):.2f}, slowest {1e3 * max(times):.2f})")  # fmt: skip
    print(f"the adapter has {found[True][0] / found[False][0]:.1%} of the bytes")


if __name__ == "__main__":
    main()
