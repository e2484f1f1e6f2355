"""The results of benchmarks/envs_compare.py, in a file that is whole after each measurement."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Results"]

Measured = dict[str, dict[str, dict[str, dict[str, Any]]]]


class Results:
    """What was measured: by row, library and seed.

    Args:
        file: read if it exists, and written after each measurement; None to keep nothing.

    Raises:
        ValueError: the file has something else in it.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.measured: Measured = {}
        if file is None or not file.exists():
            return
        try:
            self.measured = json.loads(file.read_text())
            for by_library in self.measured.values():
                for by_seed in by_library.values():
                    for seed, found in by_seed.items():
                        if int(seed) < 0 or not isinstance(found, dict):
                            raise TypeError(f"a result of seed {seed} is {found!r}")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is no file of results of this program ({error!r}): name another one by --json, or remove it"
            ) from None

    def has(self, row: str, library: str, seed: int, limit_s: float) -> bool:
        """Whether there is a result that a new measurement with ``limit_s`` seconds could not better."""
        found = self.measured.get(row, {}).get(library, {}).get(str(seed))
        if found is None or "failed" in found:
            return False
        return not found.get("stopped", "").endswith(" s") or bool(found["limit_s"] >= limit_s)

    def add(self, row: str, library: str, seed: int, found: dict[str, Any]) -> None:
        self.measured.setdefault(row, {}).setdefault(library, {})[str(seed)] = found
        if self.file is not None:
            new = self.file.with_name(self.file.name + ".new")
            new.write_text(json.dumps(self.measured, indent=1) + "\n")
            os.replace(new, self.file)
