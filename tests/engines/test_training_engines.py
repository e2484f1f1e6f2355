"""One suite for all training engines: real jobs with one and two ranks, the same model, the same data."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmesh.errors import UsageError
from rlmesh.rl.engines.training.forward import response_log_probs
from rlmesh.rl.engines.training.protocol import TrainingOptions
from rlmesh.testing import LocalCluster
from tests.engines import training_job
from tests.engines.training_model import build_policy

WITH_DEEPSPEED = [
    pytest.mark.engines,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'rlmesh[deepspeed]'"
    ),
]
KINDS = ["ddp", "fsdp2", *(pytest.param(f"zero{stage}", marks=WITH_DEEPSPEED) for stage in (1, 2, 3))]

PUSHED = [
    "ddp",
    "fsdp2",
    *(pytest.param(kind, marks=[*WITH_DEEPSPEED, pytest.mark.soak]) for kind in ("zero1", "zero2")),
    pytest.param("zero3", marks=WITH_DEEPSPEED),
]
"""Those of ZeRO 1 and 2 are pushed by the same source as ZeRO 3."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Seen = list[dict[str, Any]]
"""What each rank saw."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives what the ranks of a job saw; one job for each kind of engine and number of ranks, run when asked for."""

    @cache
    def run(kind: str, ranks: int) -> Seen:
        folder = tmp_path_factory.mktemp(f"{kind}-{ranks}")
        with LocalCluster(run_root=folder):
            training_job.build(folder, ranks, kinds=[kind]).submit("engines")
        return [torch.load(folder / kind / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]

    return run


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def rows(seen: Seen, *path: str) -> torch.Tensor:
    """Rows of all ranks, in order."""
    found: list[Any] = list(seen)
    for name in path:
        found = [each[name] for each in found]
    return torch.cat(found)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    far = {name: float((a[name].float() - b[name].float()).abs().max()) for name in a}
    assert max(far.values()) <= tolerance, far


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_the_plain_model(kind: str, ranks: int, runs: Any) -> None:
    seen, whole = runs(kind, ranks), training_job.WHOLE
    with torch.no_grad():
        wanted = response_log_probs(build_policy().eval(), whole.sequences, whole.attention_mask, whole.action_mask)
    torch.testing.assert_close(rows(seen, "before"), wanted, rtol=0, atol=1e-5)
    assert all(training_job.same(each["start"], start()) for each in seen), "weights are handed out as they are"
    assert all(each["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"} for each in seen)


@cache
def start() -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build_policy().named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_give_the_same_weights_on_every_engine(kind: str, ranks: int, runs: Any) -> None:
    """Against one rank of DDP, which is the plain model."""
    seen, wanted = runs(kind, ranks), runs("ddp", 1)
    moved = max((wanted[0]["trained"]["weights"][n] - start()[n]).abs().max() for n in start())
    assert moved > 0.02, "it was trained"
    for each in seen:
        close(each["trained"]["weights"], wanted[0]["trained"]["weights"], 2e-4)
        for report, other in zip(each["trained"]["reports"], wanted[0]["trained"]["reports"], strict=True):
            assert report.step == other.step and report.lr == other.lr
            assert report.loss == pytest.approx(other.loss, abs=1e-4)
            assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
            assert report.statistics == {"tokens": float(training_job.WHOLE.action_mask.sum())}
    torch.testing.assert_close(
        rows(seen, "trained", "log_probs"), rows(wanted, "trained", "log_probs"), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("variant", ["in one pass", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_and_activation_checkpointing_change_nothing(
    kind: str, variant: str, ranks: int, runs: Any
) -> None:
    for each in runs(kind, ranks):
        close(each[variant]["weights"], each["trained"]["weights"], 2e-4)
        counts = {report.micro_batches for report in each[variant]["reports"]}
        per_rank = -(-len(training_job.WHOLE) // ranks)
        assert counts == {1} if variant == "in one pass" else counts == {-(-per_rank // 2)}


@pytest.mark.parametrize("variant", ["bfloat16", "checkpointed bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_to_float32(kind: str, variant: str, ranks: int, runs: Any) -> None:
    for each in runs(kind, ranks):
        for report, other in zip(each[variant]["reports"], each["trained"]["reports"], strict=True):
            assert report.loss == pytest.approx(other.loss, abs=0.02)
            assert report.grad_norm == pytest.approx(other.grad_norm, rel=0.05)
        kinds = {tensor.dtype for tensor in each[variant]["weights"].values()}
        assert kinds == {torch.bfloat16 if kind.startswith("zero") else torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_who_loads_a_checkpoint_goes_on_exactly(kind: str, ranks: int, runs: Any) -> None:
    for each in runs(kind, ranks):
        seen = each["checkpoint"]
        assert seen["taken"], "the weights are those of the moment of save(), not those of a step later"
        assert seen["goes_on"], "weights after the next step are equal, so optimizer state came back"
        assert seen["again"].step == seen["report"].step == 4 and seen["again"].loss == seen["report"].loss
        assert len(seen["files"]) == 2 and seen["files"][0] == "current.json", "older data are gone"


@pytest.mark.parametrize("kind", KINDS)
def test_offload_frees_all_memory_and_reload_brings_all_back(kind: str, ranks: int, runs: Any) -> None:
    for each in runs(kind, ranks):
        seen = each["offload"]
        for where in ("memory", "file"):
            assert seen[f"{where} bytes"] == 0
            assert seen[f"{where} same"] and seen[f"{where} source"]
            assert all("its weights are offloaded; call reload() first" in text for text in seen[f"{where} refused"])
        assert seen["left"] == [] and seen["step"] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_is_exported(kind: str, ranks: int, runs: Any) -> None:
    seen = runs(kind, ranks)
    torch.testing.assert_close(rows(seen, "export", "there"), rows(seen, "export", "here"), rtol=0, atol=1e-5)
    for each in seen:
        assert each["export"]["tied"]
        assert {"config.json", "model.safetensors"} <= set(each["export"]["files"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str, ranks: int, runs: Any) -> None:
    for each in runs(kind, ranks):
        seen = each["not finite"]
        assert "gradient of step 6 is not finite" in seen["error"] and seen["unchanged"]
        assert seen["after"].step == 6 and seen["after"].grad_norm > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_is_trained_alike(kind: str, ranks: int, runs: Any) -> None:
    seen, wanted = runs(kind, ranks), runs("ddp", 1)
    for moment in ("before", "after"):
        torch.testing.assert_close(rows(seen, "critic", moment), rows(wanted, "critic", moment), rtol=0, atol=1e-3)
    for each in seen:
        assert each["critic"]["kinds"]["scale"] == "buffer"
        assert each["critic"]["reports"][2].loss == pytest.approx(wanted[0]["critic"]["reports"][2].loss, abs=1e-3)


def test_options_say_all_that_is_wrong_with_them() -> None:
    with pytest.raises(UsageError, match=r"lr=-1.*micro_batch_size=-2.*precision='float16'"):
        TrainingOptions(lr=-1, micro_batch_size=-2, precision="float16")  # type: ignore[arg-type]


@pytest.mark.case("O18")
@pytest.mark.engines
@pytest.mark.parametrize("kind", PUSHED)
def test_what_is_pushed_is_taken_bit_for_bit(kind: str, ranks: int, tmp_path: Path) -> None:
    """Whole models with ties, a cast that was allowed, and with peft an adapter alone or merged in."""
    with LocalCluster(run_root=tmp_path):
        training_job.build(tmp_path, ranks, sources=[kind], peft=find_spec("peft") is not None).submit("sources")
    seen = torch.load(tmp_path / f"{kind}.pt", weights_only=False)
    assert len(seen) == (4 if find_spec("peft") is not None else 2)
    for (lora, dtype), case in seen.items():
        assert len(case["given"]) == ranks and len(case["taken"]) == 2 and case["buckets"] > 1
        for given in case["given"]:
            wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in given.items()}
            assert all(training_job.same(taken, wanted) for taken in case["taken"]), (lora, dtype)
        assert case["tied"] == [not lora] * 2
        assert case["left"] == [0] * ranks, "weights that were synced can still be offloaded"
        assert "its weights are offloaded; call reload() first" in case["refused"]
    if len(seen) == 4:
        adapter, merged = seen["adapter", "float32"]["given"][0], seen["merged", "float32"]["given"][0]
        assert all("lora_" in name for name in adapter) and not any("lora_" in name for name in merged)
        name = "model.layers.0.self_attn.q_proj"
        a, b = (adapter[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
        base = build_policy(tied=False).get_parameter(f"{name}.weight").detach()
        torch.testing.assert_close(merged[f"{name}.weight"], base + 2.0 * b @ a, rtol=0, atol=1e-6)
