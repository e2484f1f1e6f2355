"""Fixtures of `conformance`: one engine per class, since some take seconds to start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmesh.errors import WeightsNotReady
from rlmesh.rl.engines.rollout import RolloutEngine, SamplingParams
from tests.engines.conformance import Served
from tests.engines.models import PROBE, PROMPTS, save, tiny

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)  # the real model is the one of examples/smollm


@pytest.fixture(scope="class")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny(0, tied=request.cls.tied), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="class")
def shared(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutEngine]:
    engine: RolloutEngine = request.cls.make(folder)
    with pytest.raises(WeightsNotReady, match="no weights have come yet"):
        engine.generate(PROMPTS, SamplingParams(1))
    with pytest.raises(WeightsNotReady, match="no weights have come yet"):
        engine.log_probs(PROBE)
    # What libraries start when something is first asked of them is there before the first test looks.
    Served(engine, None, request.cls.tied).push(tiny(0, tied=request.cls.tied), 1)
    engine.generate(PROMPTS, SamplingParams(2))
    engine.sleep(1)
    engine.wake()
    yield engine
    engine.close()
    del engine
    gc.collect()


@pytest.fixture
def served(request: pytest.FixtureRequest, shared: RolloutEngine) -> Served:
    """It serves version 1 of ``tiny(0)``."""
    made = Served(shared, tiny(0, tied=request.cls.tied), request.cls.tied)
    made.engine.pause_mode = "keep"  # type: ignore[attr-defined]
    made.push(made.model, 1)
    return made
