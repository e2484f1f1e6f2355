"""An engine with one rank makes no collectives: on a GPU, the first one would make NCCL take memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlmesh.rl.engines.training import ranks
from tests.engines import checkpoint_writer

MIB = 1 << 20


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_asks_nothing_of_its_process_group(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("a collective of one rank")

    for name in ("all_reduce", "broadcast", "broadcast_object_list", "barrier", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, refuse)
    engine = checkpoint_writer.make(MIB)
    assert engine.model is engine.plain, "DistributedDataParallel sends all weights when it is made"
    checkpoint_writer.step(engine)
    assert engine.steps == 1
    assert ranks.from_first("value") == "value" and ranks.summed(torch.ones(2)).tolist() == [1, 1]
    engine.close()


def test_a_step_in_a_group_of_one_is_the_step_without_a_group() -> None:
    def stepped() -> torch.Tensor:
        torch.manual_seed(0)
        engine = checkpoint_writer.make(MIB)
        checkpoint_writer.step(engine)
        engine.close()
        weight: torch.Tensor = engine.plain.weight
        return weight.detach().clone()

    alone = stepped()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert torch.equal(stepped(), alone)
    finally:
        dist.destroy_process_group()
