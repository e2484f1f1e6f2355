"""A small run as a script: ``run_script.py MODEL ALGORITHM [--set KEY=VALUE …]``."""

from __future__ import annotations

import sys
from pathlib import Path

from rlmesh.rl.trainers.settings import apply_overrides
from tests.rl.checkpoints.runs import make

if __name__ == "__main__":
    apply_overrides(make(Path(sys.argv[1]), sys.argv[2]), sys.argv[4::2]).submit("trained")
