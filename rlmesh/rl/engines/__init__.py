"""Engines: what trains and what samples, each behind a small protocol.

``training``
    `TrainingEngine`: a model, its optimizer and how both are spread over ranks.

Import from the modules themselves: each needs the library that it is for.
"""

from __future__ import annotations
