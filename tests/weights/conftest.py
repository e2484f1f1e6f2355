"""Fixtures of weight sync."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.weights.mesh import WeightMesh


@pytest.fixture(scope="session", autouse=True)
def what_stores_keep(leak_check: object) -> None:
    """The library below torch's stores opens a pipe when it is first used, and keeps it for the life of the process."""
    from torch._C._distributed_c10d import TCPStore

    TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)


@pytest.fixture
def mesh() -> Iterator[WeightMesh]:
    """An empty `WeightMesh`, which is closed at the end."""
    with tempfile.TemporaryDirectory(prefix="rlm-") as directory:
        made = WeightMesh(Path(directory))
        try:
            yield made
        finally:
            made.close()
