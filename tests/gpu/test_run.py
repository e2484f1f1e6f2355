"""A whole training on one GPU: all roles share it, or are fused, and at most one is awake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.rl import run_job, turns_job
from tests.rl.conftest import make_tiny
from tests.rl.test_run import curve, launched, reported
from tests.rl.test_turns import overlaps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

GIB = 1 << 30


@pytest.mark.parametrize("kind", ["shared", "fused"])
def test_ppo_learns_on_one_gpu(tmp_path: Path, kind: str) -> None:
    found = curve(make_tiny(tmp_path / "model"), tmp_path / kind, "ppo", kind, devices=1)
    assert sorted(found) == list(range(1, 9))
    assert found[8] > found[1] + 0.2


@pytest.mark.parametrize("kind", ["shared", "fused"])
def test_never_are_two_awake_on_one_gpu(tmp_path: Path, kind: str) -> None:
    """With a model of 110 million parameters: training takes 16 bytes for each, and whoever sleeps takes none."""
    model = make_tiny(
        tmp_path / "model", hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12,
    )  # fmt: skip
    run_dir = launched(turns_job.__file__, tmp_path / kind, str(model), kind, "gpu")
    events = [json.loads(line) for line in (run_dir / turns_job.FILE).read_text().splitlines()]
    assert overlaps(events) == []
    assert {held for *_, event, held, _ in events if event == "sleeps"} == {0}
    left = {(who, part): reserved for _, who, part, event, _, reserved in events if event == "sleeps"}
    most = max(left, key=left.__getitem__)
    assert left[most] < GIB // 4, f"of the processes whose parts sleep, {most} keeps most: " + ", ".join(
        f"{who} {part} {reserved / GIB:.2f} GiB" for (who, part), reserved in left.items()
    )
    largest = max(held for *_, held, _ in events)
    switches = sum(event == "sleeps" for *_, event, _, _ in events)
    print(f"{kind}: {switches} switches; the largest part has {largest / GIB:.2f} GiB")
    assert largest > 1.0 * GIB, "weights and two moments of 113 million parameters"
    assert sorted(reported(run_dir)) == [1, 2, 3, 4]


def test_the_curve_on_a_gpu_is_that_of_separate_roles(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    shared = curve(model, tmp_path / "shared", "grpo", "shared", devices=1)
    result = run_job.make(str(model), "grpo", "auto").here(run_dir=tmp_path / "here")
    found = {step: metrics["reward_mean"] for step, metrics in reported(result.run_dir).items()}
    assert found == pytest.approx(shared, abs=0.05)
