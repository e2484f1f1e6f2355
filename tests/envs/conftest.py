"""Ctrl-C raises `KeyboardInterrupt` in tests that press it, also where the tests run in the background of a shell."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """A shell starts programs in its background with SIGINT ignored, and Python then leaves it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
