from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # as examples/ppo/main.py does, so that "ppo" is a package


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the example's model and data, made by its command."""
    folder = tmp_path_factory.mktemp("examples") / "tiny"
    subprocess.run([sys.executable, str(EXAMPLES / "grpo_model.py"), str(folder)], check=True, timeout=300)
    return folder
