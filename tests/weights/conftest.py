"""Fixtures of weight sync."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.weights.mesh import WeightMesh


@pytest.fixture(scope="session", autouse=True)
def what_gloo_keeps(leak_check: object) -> None:
    """Gloo opens a pipe when it is first used, and keeps it for the life of the process."""
    from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

    group: Any = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=5))
    group.barrier().wait()


@pytest.fixture
def mesh() -> Iterator[WeightMesh]:
    """An empty `WeightMesh`, which is closed at the end."""
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        made = WeightMesh(Path(directory))
        try:
            yield made
        finally:
            made.close()
