"""Commands about jobs see those of this session only."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def own_jobs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same user on this machine have their sockets elsewhere."""
    bases = (os.environ["XDG_RUNTIME_DIR"],)
    monkeypatch.setattr("rlmesh.master.discovery.socket_bases", lambda: bases)
