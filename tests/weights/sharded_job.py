"""A job whose source is a module that two ranks share by FSDP2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlmesh import (
    DLJobBuilder,
    ModuleSink,
    ModuleSource,
    ReceivesWeights,
    RoleGroup,
    SendsWeights,
    WeightSync,
    current_worker,
    rpc,
)


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    model.register_buffer("mean", torch.randn(3))
    return model


def digest(model: nn.Module) -> list[float]:
    return [float(value.double().sum()) for value in model.state_dict().values()]


class Actor(SendsWeights):
    def setup(self) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.model = make_model(1)
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.send_weights(ModuleSource(self.model))

    def teardown(self) -> None:
        dist.destroy_process_group()

    @rpc
    def step(self) -> None:
        self.model(torch.ones(4, 7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @rpc
    def digest(self) -> list[float]:
        from torch.distributed.tensor import DTensor

        whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in self.model.state_dict().values()]
        return [float(value.double().sum()) for value in whole]


class Rollout(ReceivesWeights):
    def setup(self) -> None:
        torch.set_num_threads(1)
        self.model = make_model(2)
        self.receive_weights(ModuleSink(self.model))

    @rpc
    def digest(self) -> list[float]:
        with self.weights.serving():
            return digest(self.model)


class Trainer:
    def run(self) -> None:
        actor, rollout = RoleGroup[Any]("ACTOR"), RoleGroup[Any]("ROLLOUT")
        with WeightSync(actor, rollout, bucket_bytes=256) as sync:
            sync.push(1).result()
            same = [got == actor.call("digest").result()[0] for got in rollout.call("digest").result()]
            actor.call("step").result()
            stale = rollout.call("digest").result()[0] == actor.call("digest").result()[0]
            sync.push(2).result()
            after = [got == actor.call("digest").result()[0] for got in rollout.call("digest").result()]
            seen = {"same": same, "stale": stale, "after_step": after, "plan": str(sync.plan())}
        Path(current_worker().job_info.user_config["out"]).write_text(json.dumps(seen))


def build(out: Path) -> Any:
    builder = DLJobBuilder().config({"out": str(out)}).device_type("CPU")
    builder.role("ACTOR").train(Actor).nnodes(1).nproc_per_node(2).resource(cpu=0)
    builder.role("ROLLOUT").run(Rollout).total(2).resource(cpu=0)
    builder.role("TRAINER").run(Trainer).resource(cpu=0)
    return builder.build()
