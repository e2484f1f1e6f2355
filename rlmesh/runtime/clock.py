"""The clock by which deadlines are kept: seconds that only grow. Tests replace it (`rlmesh.testing.VirtualLoop`)."""

from __future__ import annotations

import time
from collections.abc import Callable

now: Callable[[], float] = time.monotonic
"""Call it as ``clock.now()``, so that a replaced clock is seen."""
