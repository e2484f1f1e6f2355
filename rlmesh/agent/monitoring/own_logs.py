"""What the job's own processes log, to their standard error, which is their log file."""

from __future__ import annotations

import logging

from rlmesh.job.masking import mask_text
from rlmesh.observe.views.safe_text import shown

__all__ = ["log_to_standard_error"]


class _Readable(logging.Formatter):
    """Without secrets, and without what a terminal would obey or UTF-8 cannot encode."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(mask_text(super().format(record)), lines=True)


def log_to_standard_error() -> None:
    """Set the process's logging up."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Readable("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
