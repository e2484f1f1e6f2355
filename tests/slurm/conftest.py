"""One Slurm for all tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, missing


@pytest.fixture(scope="session")
def slurm_of_the_session(session_leak_guard: None) -> Iterator[SlurmCluster]:
    """Three nodes. Skips where Slurm is not installed."""
    if absent := missing():
        pytest.skip(f"Slurm is not installed here ({absent}): apt-get install slurmctld slurmd slurm-client munge")
    with tempfile.TemporaryDirectory(prefix="rt-slurm-") as folder:
        Path(folder).chmod(0o755)
        with SlurmCluster(Path(folder)) as cluster:
            yield cluster


@pytest.fixture
def slurm(slurm_of_the_session: SlurmCluster, leak_guard: None) -> Iterator[SlurmCluster]:
    """The cluster, without the jobs of a test that failed."""
    yield slurm_of_the_session
    slurm_of_the_session.cancel_all()
