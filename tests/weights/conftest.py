"""Fixtures of weight sync."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weights.mesh import WeightMesh


@pytest.fixture
def mesh() -> Iterator[WeightMesh]:
    """An empty `WeightMesh`, which is closed at the end."""
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        made = WeightMesh(Path(directory))
        try:
            yield made
        finally:
            made.close()
