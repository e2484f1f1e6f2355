"""Logging of the job's own processes to standard error, which is their log file."""

from __future__ import annotations

import logging

from rlmesh.agent.monitoring.out_of_memory import EndWithoutMemory
from rlmesh.job.masking import mask_text
from rlmesh.observe.views.safe_text import shown

__all__ = ["log_to_standard_error"]


class _Readable(logging.Formatter):
    """Formats records without secrets, without terminal control codes, and encodable as UTF-8."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(mask_text(super().format(record)), lines=True)


def log_to_standard_error() -> None:
    """Set up the logging of this process. An error for want of memory ends it."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Readable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler, EndWithoutMemory()])
