"""The contract of calls, which everything that messages may pass keeps alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from rlmesh.testing.in_process import TransportName
from tests.runtime.conftest import Mesh
from tests.runtime.conftest import until as until  # A fixture.


@pytest.fixture(params=get_args(TransportName))
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """Over each transport."""
    with Mesh(request.param) as made:
        yield made
