"""A critic in half precision on a GPU, as the engines wrap it with NCCL: its values keep the digits of float32."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlmesh.rl.algorithms import PPO
from rlmesh.rl.components import Columns, value_share
from rlmesh.rl.engines.lora import LoraOptions
from rlmesh.rl.engines.training.ddp import DDPEngine
from rlmesh.rl.engines.training.fsdp2 import FSDP2Engine
from rlmesh.rl.engines.training.packed import EMPTY, PackedBatch, PackedInputs, prepare
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.rl.packing import pack
from tests.rl.episodes import padded
from tests.rl.test_critic import DRAWN, critic, evaluated

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def trained(kind: str, adapter: bool, weights: str, device: str = "cuda") -> dict[str, Any]:
    """Values of a critic before any step, and its losses in a hundred steps towards a function of the tokens."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    build: Any = FSDP2Engine if kind == "fsdp2" else DDPEngine
    model: Any = critic().to(device, dtype=getattr(torch, weights))
    options = TrainingOptions(lr=0.02, precision="bfloat16", lora=LoraOptions(rank=4) if adapter else None)
    engine = build(model, options)
    packs = pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=40).by_rank[0]
    values = [found.cpu() for found in engine.packed_values(packs)]
    batch = evaluated(torch.zeros(padded([e.mask for e in DRAWN.episodes], fill=False).shape, dtype=torch.float64))
    last = padded([np.roll(episode.ids, 1) for episode in DRAWN.episodes])
    aims = replace(PPO(value_clip=None).weigh(batch), returns=torch.sin(last.double()))
    columns = [Columns.of(one, batch, aims, device, torch.float32) for one in [*packs, EMPTY]]
    tokens = float((aims.policy > 0).sum())

    def loss(model: Any, part: Any) -> Any:
        return value_share(model(packed=part.inputs), part.columns, tokens=tokens, clip=None)

    parts = PackedBatch(packs, columns[:-1], columns[-1], device)
    losses = [engine.train_step(parts, loss).loss for _ in range(100)]
    after = [found.cpu() for found in engine.packed_values(packs)]
    engine.close()
    dist.destroy_process_group()
    return {"values": torch.cat(values), "after": torch.cat(after), "losses": losses}


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_critic_in_half_precision_learns_and_its_values_are_not_rounded(
    kind: str, adapter: bool, weights: str
) -> None:
    """In a process of its own, since torch keeps what a process group opens."""
    if adapter:
        pytest.importorskip("peft")
    packs = pack(DRAWN.episodes, groups=DRAWN.groups, token_budget=40).by_rank[0]
    twin = critic()
    prepare(twin)
    with torch.no_grad():
        exact = torch.cat([twin(packed=PackedInputs(one, "cpu")) for one in packs])
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(trained, kind, adapter, weights).result()
    values, after, losses = found["values"], found["after"], found["losses"]
    assert values.dtype == torch.float32
    if not adapter:
        # The layers compute in bfloat16: three digits of what the head adds up.
        torch.testing.assert_close(values.double(), exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))
        assert (values != values.bfloat16().float()).float().mean() > 0.5
    assert torch.isfinite(after).all()
    assert (after != after.bfloat16().float()).float().mean() > 0.5
    assert losses[-1] < 0.3 * losses[0]
