"""LoRA: only the adapter is trained, saved and pushed, and all forms of the weights say the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlmesh.errors import UsageError, WeightSyncError
from rlmesh.rl.engines.lora import LoraOptions, add_adapter, base_model_of
from rlmesh.rl.engines.training.ddp import DDPEngine
from rlmesh.rl.engines.training.forward import response_log_probs
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.rl.engines.transformers import TransformersEngine
from rlmesh.rl.packing import pack
from tests.engines.training_job import WHOLE
from tests.engines.training_model import VOCABULARY, build_policy, policy_loss
from tests.rl.episodes import episodes_of
from tests.rl.test_packed_forward import exact
from tests.weights.mesh import WeightMesh

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'rlmesh[lora]'")

# torch says so whenever a process is alone.
pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
]
LORA = LoraOptions(rank=4, alpha=12.0, seed=3)
OPTIONS = TrainingOptions(lr=0.02, micro_batch_size=4, weight_decay=0.1, lora=LORA)


def double(*, tied: bool = True) -> Any:
    return exact(build_policy(tied=tied))


def trained(options: TrainingOptions = OPTIONS, *, tied: bool = True, steps: int = 3) -> DDPEngine:
    engine = DDPEngine(double(tied=tied), options)
    rows = replace(WHOLE, targets=WHOLE.targets.double())
    for _ in range(steps):
        engine.train_step(rows, policy_loss(rows))
    return engine


def log_probs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return response_log_probs(model.eval(), WHOLE.sequences, WHOLE.attention_mask, WHOLE.action_mask)


def tensors_of(source: Any) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in source.manifest()]
    with source.gather(names) as whole:
        return {name: whole[name].detach().clone() for name in names}


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_say_what_the_adapter_says(tied: bool) -> None:
    engine = trained(tied=tied)
    wanted = engine.log_probs(WHOLE.sequences, WHOLE.attention_mask, WHOLE.action_mask)
    assert wanted.dtype == torch.float64
    assert (wanted - log_probs(double(tied=tied))).abs().max() > 1e-3, "it was trained"
    plain = double(tied=tied)
    plain.load_state_dict(tensors_of(engine.named_tensors(lora="merged")))
    torch.testing.assert_close(log_probs(plain), wanted, rtol=0, atol=1e-9)
    engine.close()


def test_only_the_adapter_is_trained_and_has_optimizer_state() -> None:
    engine = trained()
    start = dict(add_adapter(double(), LORA).named_parameters())
    moved = {name: not torch.equal(weight, start[name]) for name, weight in engine.plain.named_parameters()}
    assert all(changed == (".lora_" in name) for name, changed in moved.items())
    adapter = sum(weight.numel() for name, weight in engine.plain.named_parameters() if ".lora_" in name)
    assert sum(state["exp_avg"].numel() for state in engine.optimizer.state.values()) == adapter
    # 7 layers of a block: rank · (in + out) each.
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]
    assert adapter == 2 * sum(4 * (a + b) for a, b in sizes)
    assert engine.named_tensors().manifest().nbytes == 8 * adapter
    engine.close()


def test_packed_passes_use_the_adapter() -> None:
    drawn = episodes_of([(3, [4, 2, 7]), (5, [1])], 11)
    engine = trained()
    (one,) = pack(drawn.episodes, groups=drawn.groups, token_budget=1000).by_rank[0]
    (found,) = engine.packed_log_probs([one])
    plain = double()
    plain.load_state_dict(tensors_of(engine.named_tensors(lora="merged")))
    for value, row, place in zip(found.log_probs, one.rows, one.places, strict=True):
        ids = torch.from_numpy(drawn.episodes[row].ids).long().unsqueeze(0) % VOCABULARY
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[0, place - 1].log_softmax(-1)
        assert value.item() == pytest.approx(logits[ids[0, place]].item(), abs=1e-9)
    engine.close()


def test_a_checkpoint_has_the_adapter_only_and_goes_on_exactly(tmp_path: Path) -> None:
    engine = trained()
    engine.save(tmp_path / "adapter").result(60)
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").rglob("*.distcp"))
    other = DDPEngine(double(), replace(OPTIONS, lora=replace(LORA, seed=9)))
    other.load(tmp_path / "adapter")
    rows = replace(WHOLE, targets=WHOLE.targets.double())
    for each in (engine, other):
        each.train_step(rows, policy_loss(rows))
    mine, theirs = (tensors_of(each.named_tensors()) for each in (engine, other))
    assert other.steps == 4 and all(torch.equal(mine[name], theirs[name]) for name in mine)
    whole = trained(replace(OPTIONS, lora=None))
    whole.save(tmp_path / "whole").result(60)
    assert size < sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*.distcp")) / 2
    with pytest.raises(UsageError, match="it holds an adapter, and this engine trains all weights"):
        whole.load(tmp_path / "adapter")
    with pytest.raises(UsageError, match="it holds all weights, and this engine trains an adapter"):
        engine.load(tmp_path / "whole")
    with pytest.raises(UsageError, match=r"lora_A.* of shape \(4, 32\), and this engine of \(8, 32\)"):
        DDPEngine(double(), replace(OPTIONS, lora=LoraOptions(rank=8))).load(tmp_path / "adapter")
    base = exact(build_policy(seed=1))
    with pytest.raises(UsageError, match=r"trained on another base model: .* of its .* weights differ"):
        DDPEngine(base, OPTIONS).load(tmp_path / "adapter")


def test_exports_are_read_by_transformers_and_by_peft(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = trained()
    wanted = engine.log_probs(WHOLE.sequences, WHOLE.attention_mask, WHOLE.action_mask)
    engine.export(tmp_path / "merged")
    merged = exact(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64))
    torch.testing.assert_close(log_probs(merged), wanted, rtol=0, atol=1e-9)
    engine.export(tmp_path / "adapter", adapter_only=True)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    added = peft.PeftModel.from_pretrained(double(), tmp_path / "adapter")
    torch.testing.assert_close(log_probs(added), wanted, rtol=0, atol=1e-9)
    engine.close()
    with pytest.raises(UsageError, match="the model has no adapter"):
        DDPEngine(double(), replace(OPTIONS, lora=None)).export(tmp_path / "none", adapter_only=True)


@pytest.fixture
def mesh() -> Iterator[WeightMesh]:
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        made = WeightMesh(Path(directory))
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("mode", ["double_buffer", "in_place"])
def test_a_push_of_the_adapter_gives_the_engine_the_trainers_log_probs(mode: str, mesh: WeightMesh) -> None:
    trainer = trained()
    engine = TransformersEngine(double(), mode=mode, lora=LORA, stop_token_ids=[])
    rows = [row[mask].tolist() for row, mask in zip(WHOLE.sequences, WHOLE.attention_mask, strict=True)]
    rows = [row for row in rows if len(row) > 1]
    mesh.add_sink(engine.sink, 0)
    sync = mesh.sync(trainer.named_tensors())
    for version in (1, 2):
        sync.push(version).result(60)
        merged = double()
        merged.load_state_dict(tensors_of(trainer.named_tensors(lora="merged")))
        for row, found in zip(rows, engine.log_probs(rows), strict=True):
            ids = torch.tensor([row])
            for model in (trainer.plain.eval(), merged):
                with torch.no_grad():
                    wanted = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                assert found == pytest.approx(wanted.tolist(), abs=1e-9)
        moved = sum(bucket.nbytes for bucket in sync.plan().buckets)
        adapter = sum(weight.numel() for weight in trainer.plain.parameters() if weight.requires_grad)
        assert moved == 8 * adapter, "nothing but the adapter travels"
        data = replace(WHOLE, targets=WHOLE.targets.double())
        trainer.train_step(data, policy_loss(data))
    # Asleep at level 2 the adapter is gone; the base model, which no push brings, is not.
    before = engine.log_probs(rows)
    engine.sleep(2)
    engine.wake()
    assert engine.version is None
    sync.push(3).result(60)
    assert engine.version == 3 and engine.log_probs(rows)[0] != before[0]
    engine.close()
    trainer.close()


def test_a_merged_push_fits_an_engine_without_adapter_and_no_other(mesh: WeightMesh) -> None:
    trainer = trained(tied=False)
    engine = TransformersEngine(double(tied=False))
    mesh.add_sink(engine.sink, 0)
    mesh.sync(trainer.named_tensors(lora="merged")).push(1).result(60)
    ids = WHOLE.sequences[:1]
    with torch.no_grad():
        wanted = trainer.plain.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert engine.log_probs(ids.tolist())[0] == pytest.approx(wanted.tolist(), abs=1e-9)
    with pytest.raises(WeightSyncError, match="lora_A"):
        mesh.sync(trainer.named_tensors()).push(2).result(60)
    engine.close()
    trainer.close()


def test_wrong_options_are_told_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"rank=0.*alpha=-1.*target_modules='q_proj': it is 'all-linear', or a list"):
        LoraOptions(rank=0, alpha=-1, target_modules="q_proj")
    for targets, said in (
        (("q_porj",), "no linear layer 'q_porj'; did you mean 'q_proj'"),
        (("lm_head",), "'lm_head' is the head"),
        (("x",), "the linear layers are down_proj, gate_proj"),
    ):
        with pytest.raises(UsageError, match=said):
            add_adapter(build_policy(tied=False), LoraOptions(target_modules=targets))
    with pytest.raises(UsageError, match="has an adapter already"):
        add_adapter(add_adapter(build_policy(), LORA), LORA)
    assert LoraOptions(rank=8).scale == 2 and LORA.scale == 3
    few = add_adapter(build_policy(), LoraOptions(target_modules=("q_proj", "layers.1.mlp.up_proj")))
    adapted = {name.split(".lora_")[0] for name, weight in few.named_parameters() if weight.requires_grad}
    assert len(adapted) == 3 and base_model_of(few) is not few
