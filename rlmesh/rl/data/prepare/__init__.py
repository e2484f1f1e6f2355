"""Preparation of well-known data sets: from their usual files to parquet files with the columns of `RLHFDataset`.

Nothing is downloaded: the files are given.
"""

from __future__ import annotations

from rlmesh.rl.data.prepare.sets import SETS, prepare

__all__ = ["SETS", "prepare"]
