"""A slow reward function in a module of its own: the processes that score import it, not torch."""

from __future__ import annotations

import time


def slow(response: str) -> float:
    time.sleep(0.015)
    return response.count("a") / 4
