"""Fixtures of `conformance`: one engine per class, since some take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmesh.rl.engines.rollout import RolloutEngine
from tests.engines.conformance import Served
from tests.engines.models import save, tiny


@pytest.fixture(scope="class")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny(0, tied=request.cls.tied), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="class")
def shared(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutEngine]:
    engine: RolloutEngine = request.cls.make(folder)
    yield engine
    engine.close()


@pytest.fixture
def served(request: pytest.FixtureRequest, shared: RolloutEngine) -> Served:
    """Serves version 1 of ``tiny(0)``."""
    made = Served(shared, tiny(0, tied=request.cls.tied), request.cls.tied)
    made.engine.pause_mode = "keep"  # type: ignore[attr-defined]
    made.push(made.model, 1)
    return made
