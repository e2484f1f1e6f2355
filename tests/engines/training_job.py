"""A job whose ACTOR ranks put one kind of training engine through everything, and write down what they saw.

Each rank writes ``rank-<r>.pt``; `test_training_engines.py` looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rlmesh import (
    ModuleSink,
    ModuleSource,
    ReceivesWeights,
    RLJobBuilder,
    RoleGroup,
    SendsWeights,
    WeightSync,
    current_worker,
    rpc,
)
from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.rl.engines.training.protocol import TrainingOptions
from tests.engines.training_model import Critic, Rows, build_policy, critic_loss, make_rows, policy_loss

WHOLE = make_rows(11)
OPTIONS = TrainingOptions(lr=0.01, micro_batch_size=2, max_grad_norm=0.5, weight_decay=0.1, eps=1e-5)


def make_engine(kind: str, model: Any, options: TrainingOptions) -> Any:
    if kind == "ddp":
        from rlmesh.rl.engines.training.ddp import DDPEngine

        return DDPEngine(model, options)
    if kind == "fsdp2":
        from rlmesh.rl.engines.training.fsdp2 import FSDP2Engine

        return FSDP2Engine(model, options)
    from rlmesh.rl.engines.training.zero import DeepSpeedEngine

    stage: Any = int(kind.removeprefix("zero"))
    # Else parameters this small would not be partitioned.
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    return DeepSpeedEngine(model, options, stage=stage, config=config)


def weights_of(engine: Any) -> dict[str, Tensor]:
    source = engine.named_tensors()
    names = [spec.name for spec in source.manifest() if spec.alias_of is None]
    with source.gather(names) as whole:
        return {name: whole[name].detach().clone() for name in names}


def three_steps(engine: Any, mine: Rows) -> dict[str, Any]:
    reports = [engine.train_step(mine, policy_loss(WHOLE)) for _ in range(3)]
    return {"reports": reports, "weights": weights_of(engine), "log_probs": log_probs(engine, mine)}


def log_probs(engine: Any, mine: Rows) -> Tensor:
    found: Tensor = engine.log_probs(mine.sequences, mine.attention_mask, mine.action_mask)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def exercise(kind: str, folder: Path, mine: Rows) -> dict[str, Any]:
    """Everything, one after the other; what was seen."""
    engine = make_engine(kind, build_policy(), OPTIONS)
    seen: dict[str, Any] = {"before": log_probs(engine, mine), "start": weights_of(engine)}
    seen["aliases"] = {spec.name: spec.alias_of for spec in engine.named_tensors().manifest() if spec.alias_of}
    seen["trained"] = three_steps(engine, mine)
    variants = {
        "in one pass": replace(OPTIONS, micro_batch_size=0),
        "checkpointed": replace(OPTIONS, activation_checkpointing=True),
        "bfloat16": replace(OPTIONS, precision="bfloat16"),
        "checkpointed bfloat16": replace(OPTIONS, precision="bfloat16", activation_checkpointing=True),
    }
    for name, options in variants.items():
        other = make_engine(kind, build_policy(), options)
        seen[name] = three_steps(other, mine)
        other.close()
    seen["checkpoint"] = checkpoint(kind, engine, folder / "checkpoint", mine)
    seen["offload"] = offload(engine, folder, mine)
    seen["export"] = export(engine, folder / "export", mine)
    seen["not finite"] = not_finite(engine, mine)
    engine.close()
    seen["critic"] = critic(kind, mine)
    return seen


def checkpoint(kind: str, engine: Any, folder: Path, mine: Rows) -> dict[str, Any]:
    """Saved while training goes on; another engine goes on from it exactly."""
    before = weights_of(engine)
    saving = engine.save(folder)
    report = engine.train_step(mine, policy_loss(WHOLE))
    saving.result(60)
    other = make_engine(kind, build_policy(seed=3), OPTIONS)
    other.load(folder)
    taken = same(weights_of(other), before)
    again = other.train_step(mine, policy_loss(WHOLE))
    goes_on = same(weights_of(other), weights_of(engine))
    other.save(folder).result(60)
    other.close()
    return {"taken": taken, "goes_on": goes_on, "report": report, "again": again, "files": sorted(listing(folder))}


def listing(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def offload(engine: Any, folder: Path, mine: Rows) -> dict[str, Any]:
    before, source = weights_of(engine), engine.named_tensors()
    with source.gather(list(before)) as whole:
        shown = {name: tensor.detach().clone() for name, tensor in whole.items()}
    results: dict[str, Any] = {}
    for name, where in (("memory", None), ("file", folder)):
        engine.offload(where)
        engine.offload(where)
        results[f"{name} bytes"] = sum(local(t).untyped_storage().nbytes() for t in engine._memory() if not t.is_meta)
        results[f"{name} refused"] = [refused(lambda: log_probs(engine, mine)), refused(lambda: weights_of(engine))]
        engine.reload()
        engine.reload()
        results[f"{name} same"] = same(weights_of(engine), before)
        with source.gather(list(before)) as whole:
            results[f"{name} source"] = same({n: t.detach() for n, t in whole.items()}, shown)
    results["left"] = [path.name for path in folder.glob(f"rank-{engine.rank:05d}.offload")]
    # It must go on as if nothing had been.
    results["step"] = engine.train_step(mine, policy_loss(WHOLE)).step
    return results


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def refused(work: Any) -> str:
    try:
        work()
    except UsageError as error:
        return str(error)
    return ""


def export(engine: Any, folder: Path, mine: Rows) -> dict[str, Any]:
    engine.export(folder)
    engine.export(folder)  # over what is there
    if dist.is_initialized():
        dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    from rlmesh.rl.engines.training.forward import response_log_probs

    with torch.no_grad():
        there = response_log_probs(model, mine.sequences, mine.attention_mask, mine.action_mask)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return {"there": there, "here": log_probs(engine, mine), "tied": tied, "files": sorted(listing(folder))}


def not_finite(engine: Any, mine: Rows) -> dict[str, Any]:
    before = weights_of(engine)

    def loss(model: Any, part: Rows) -> Any:
        share, statistics = policy_loss(WHOLE)(model, part)
        return share * float("inf"), statistics

    try:
        engine.train_step(mine, loss)
        error = ""
    except FloatingPointError as found:
        error = str(found)
    unchanged = same(weights_of(engine), before)
    report = engine.train_step(mine, policy_loss(WHOLE))
    return {"error": error, "unchanged": unchanged, "after": report}


def critic(kind: str, mine: Rows) -> dict[str, Any]:
    engine = make_engine(kind, Critic(), replace(OPTIONS, activation_checkpointing=True))
    before = engine.values(mine.sequences, mine.attention_mask, mine.action_mask)
    reports = [engine.train_step(mine, critic_loss(WHOLE)) for _ in range(3)]
    after = engine.values(mine.sequences, mine.attention_mask, mine.action_mask)
    kinds = {spec.name: spec.kind for spec in engine.named_tensors().manifest()}
    engine.close()
    return {"before": before, "after": after, "reports": reports, "kinds": kinds}


def share() -> Rows:
    """This rank's rows."""
    return WHOLE.split(dist.get_world_size())[dist.get_rank()]


class Actor(SendsWeights):
    def setup(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.engine: Any = None

    def teardown(self) -> None:
        dist.destroy_process_group()

    @rpc
    def exercise(self, kind: str, folder: str) -> None:
        rank = dist.get_rank()
        place = Path(folder)
        place.mkdir(exist_ok=True)
        seen = exercise(kind, place, share())
        torch.save(seen, place / f"rank-{rank}.pt")

    @rpc
    def prepare(self, kind: str, lora: Any) -> None:
        model = with_adapter(build_policy(tied=False)) if lora else build_policy()
        self.engine = make_engine(kind, model, replace(OPTIONS, precision="float32"))
        self.engine.train_step(share(), policy_loss(WHOLE))
        self.send_weights(self.engine.named_tensors(lora=lora))

    @rpc
    def given(self) -> dict[str, Tensor]:
        source = self.weights_source.source
        names = [spec.name for spec in source.manifest()]
        with source.gather(names) as whole:
            return {name: whole[name].detach().clone() for name in names}

    @rpc
    def offload(self) -> int:
        self.engine.offload()
        return sum(local(t).untyped_storage().nbytes() for t in self.engine._memory() if not t.is_meta)

    @rpc
    def finish(self) -> None:
        self.engine.close()
        self.close_weights_source()


class Rollout(ReceivesWeights):
    @rpc
    def prepare(self, lora: Any, dtype: str) -> None:
        torch.set_num_threads(1)
        model = build_policy(seed=9, tied=not lora).to(getattr(torch, dtype))
        self.model = with_adapter(model) if lora == "adapter" else model
        self.receive_weights(ModuleSink(self.model, lora="adapter" if lora == "adapter" else ""))

    @rpc
    def taken(self, lora: Any) -> dict[str, Tensor]:
        with self.weights.serving():
            source = ModuleSource(self.model, lora="adapter" if lora == "adapter" else "")
            names = [spec.name for spec in source.manifest()]
            with source.gather(names) as whole:
                return {name: whole[name].detach().clone() for name in names}

    @rpc
    def is_tied(self) -> bool:
        return self.model.get_input_embeddings().weight is self.model.get_output_embeddings().weight


def with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    )


CASES = [("", "float32"), ("", "bfloat16"), ("adapter", "float32"), ("merged", "float32")]


class Trainer:
    def run(self) -> None:
        settings = current_worker().job_info.user_config
        for kind in settings["kinds"]:
            RoleGroup[Any]("ACTOR").call("exercise", kind, f"{settings['out']}/{kind}").result(300)
        for kind in settings["sources"]:
            cases = CASES if settings["peft"] else CASES[:2]
            seen = {(lora, dtype): push(kind, lora, dtype) for lora, dtype in cases}
            torch.save(seen, f"{settings['out']}/{kind}.pt")


def push(kind: str, lora: str, dtype: str) -> dict[str, Any]:
    """One engine's weights, pushed into two sinks; what was given, what was taken."""
    actor, rollout = RoleGroup[Any]("ACTOR"), RoleGroup[Any]("ROLLOUT")
    actor.call("prepare", kind, lora).result(120)
    rollout.call("prepare", lora, dtype).result(60)
    casts = {"float32": "bfloat16"} if dtype == "bfloat16" else False
    with WeightSync(actor, rollout, bucket_bytes=2048, allow_cast=casts) as sync:
        sync.push(1).result(60)
        given, taken = actor.call("given").result(60), list(rollout.call("taken", lora).result(60))
        tied, buckets = list(rollout.call("is_tied").result(60)), len(sync.plan().buckets)
        left = list(actor.call("offload").result(60))
        try:
            sync.push(2).result(60)
            refused = ""
        except WeightSyncError as error:
            refused = str(error)
    actor.call("finish").result(60)
    return {"given": list(given), "taken": taken, "tied": tied, "buckets": buckets, "left": left, "refused": refused}


def build(out: Path, ranks: int, *, kinds: Sequence[str] = (), sources: Sequence[str] = (), peft: bool = False) -> Any:
    settings = {"out": str(out), "kinds": list(kinds), "sources": list(sources), "peft": peft}
    builder = RLJobBuilder().config(settings).device_type("CPU")
    builder.trainer(Trainer).resource(cpu=0)
    builder.actor(Actor).total(ranks).resource(cpu=0)
    if sources:
        builder.rollout(Rollout).total(2).resource(cpu=0)
    return builder.build()
