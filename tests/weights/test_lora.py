"""LoRA adapters of peft: alone, or merged into the base model's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.weights.module_sink import ModuleSink
from rlmesh.weights.module_source import ModuleSource
from tests.own_time import HANG_S
from tests.weights.mesh import WeightMesh

peft = pytest.importorskip("peft", reason="peft is not installed")


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


def adapted(seed: int, adapter_seed: int) -> Any:
    model = peft.get_peft_model(Model(seed), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["first", "second"]))
    torch.manual_seed(adapter_seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model


def test_merged_weights_fit_the_plain_model(mesh: WeightMesh) -> None:
    trained, plain = adapted(1, 2), Model(3)
    mesh.add_sink(ModuleSink(plain), 0)
    base = {name: value.clone() for name, value in trained.state_dict().items()}
    mesh.sync(ModuleSource(trained, lora="merged")).push(1).result(HANG_S)
    x = torch.randn(5, 6)
    torch.testing.assert_close(plain(x), trained(x))
    assert all(torch.equal(value, base[name]) for name, value in trained.state_dict().items()), "nothing was merged"


@pytest.mark.case("b11")
def test_an_adapter_that_is_merged_or_not_at_each_push(mesh: WeightMesh) -> None:
    trained, plain = adapted(1, 2), Model(3)
    mesh.add_source(ModuleSource(trained, lora="merged"))
    mesh.add_sink(ModuleSink(plain), 0)
    sync, x = mesh.sync(), torch.randn(5, 6)
    changes = [
        lambda: None,
        trained.merge_adapter,
        trained.unmerge_adapter,
        lambda: trained.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first", "second"])),
        lambda: trained.base_model.model.second.base_layer.weight.data.add_(1),
    ]
    for version, change in enumerate(changes):
        change()
        sync.push(version).result(HANG_S)
        torch.testing.assert_close(plain(x), trained(x), msg=f"push {version}")
    trained.set_adapter("other")
    trained.merge_adapter(["other"])
    with pytest.raises(WeightSyncError, match=r"the adapters other are merged .*unmerge_adapter\(\)"):
        sync.push(9).result(HANG_S)
    trained.unmerge_adapter()
    trained.delete_adapter("default")
    with pytest.raises(WeightSyncError, match="the model has no adapter 'default'"):
        sync.push(10).result(HANG_S)


@pytest.mark.case("b11")
def test_an_adapter_that_is_put_into_the_model_itself(mesh: WeightMesh) -> None:
    model, plain = Model(1), Model(3)
    mesh.add_source(ModuleSource(model))
    member = mesh.add_sink(ModuleSink(plain), 0)
    sync = mesh.sync()
    sync.push(1).result(HANG_S)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["first"]))
    with pytest.raises(WeightSyncError, match="not those that the plan was made for"):
        sync.push(2).result(HANG_S)
    with pytest.raises(WeightSyncError, match=r"the source has no first.weight.*; the nearest name there is"):
        sync.push(2).result(HANG_S)
    assert member.weights.version == 1


def test_the_adapter_alone_goes_to_the_same_adapter(mesh: WeightMesh) -> None:
    trained, engine = adapted(1, 2), adapted(1, 7)
    source = ModuleSource(trained, lora="adapter")
    assert all("lora_" in spec.name and ".default" not in spec.name for spec in source.manifest())
    mesh.add_sink(ModuleSink(engine, lora="adapter"), 0)
    mesh.sync(source).push(1).result(HANG_S)
    x = torch.randn(5, 6)
    torch.testing.assert_close(engine(x), trained(x))


def test_a_model_without_that_adapter_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has no adapter 'default'; it has none"):
        ModuleSource(Model(1), lora="merged")
    with pytest.raises(UsageError, match="the model has no adapter 'other'; it has default"):
        ModuleSource(adapted(1, 2), lora="adapter", adapter="other")
