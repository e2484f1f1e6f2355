from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from rlmesh.memory.exchange import MemoryExchange
from rlmesh.memory.pool import SegmentPool


@pytest.fixture
def job_id() -> str:
    return f"test{uuid.uuid4().hex[:8]}"


@pytest.fixture
def pool(job_id: str) -> Iterator[SegmentPool]:
    pool = SegmentPool(job_id, "owner", limit_bytes=256 << 20)
    yield pool
    pool.close()


@pytest.fixture
def exchange(job_id: str) -> Iterator[MemoryExchange]:
    exchange = MemoryExchange(job_id, "main", wake=lambda: None, limit_bytes=256 << 20)
    yield exchange
    exchange.close(0)
