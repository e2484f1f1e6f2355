"""The engine that docs/writing-an-engine.md writes, under a real weight sync."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlmesh import ModuleSource
from rlmesh.errors import UsageError, WeightsNotReady, WeightSyncError
from rlmesh.rl.engines.rollout import RolloutEngine, SamplingParams
from tests.weights.mesh import WeightMesh

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-an-engine.md"


class Table(nn.Module):
    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))


def written() -> dict[str, Any]:
    """What the page's program defines."""
    (program,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "BigramEngine:" in block
    )
    names: dict[str, Any] = {"__name__": "bigrams"}
    exec(compile(program, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def mesh() -> Iterator[WeightMesh]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        made = WeightMesh(Path(directory))
        try:
            yield made
        finally:
            made.close()


@pytest.mark.case("O17")
def test_the_engine_of_the_page_samples_what_it_was_pushed(mesh: WeightMesh) -> None:
    engine: RolloutEngine = written()["BigramEngine"](vocabulary=16, end=0)
    prompts, params = [[3, 4], [5]], SamplingParams(max_tokens=20, seed=1)
    with pytest.raises(WeightsNotReady):
        engine.generate(prompts, params)
    mesh.add_sink(engine.sink, 0)
    for version in (1, 2):
        trained = Table(16, version)
        mesh.sync(ModuleSource(trained)).push(version).result(30)
        of = trained.table.detach().log_softmax(-1)
        for sample in engine.generate(prompts, params):
            tokens = [*sample.prompt_token_ids, *sample.token_ids]
            found = engine.log_probs([tokens])[0]
            assert found == pytest.approx([of[a, b].item() for a, b in itertools.pairwise(tokens)], abs=1e-5)
            assert sample.log_probs == pytest.approx(found[len(sample.prompt_token_ids) - 1 :], abs=1e-5)
            assert sample.version_spans == [(version, 0, len(sample.token_ids))]
            assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 0 else "length")
    with pytest.raises(WeightSyncError, match=r"the source has shape \[9, 9\]"):
        mesh.sync(ModuleSource(Table(9, 0))).push(3)
    with pytest.raises(UsageError, match="this engine can wait"):
        engine.pause("keep")
    engine.sleep(2)
    engine.wake()
    with pytest.raises(WeightsNotReady, match="gave its weights up"):
        engine.generate(prompts, params)
