"""The code blocks of docs/replay.md and docs/checking-environments.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.envs.test_page import run

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "prints"), [("replay", ["(8, 20, 4)", "(8,)"]), ("checking-environments", ["make: passed"])]
)
def test_the_blocks_of_the_page_run(page: str, prints: list[str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = run(tmp_path / "page.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in prints if line not in done.stdout.splitlines()] == []
