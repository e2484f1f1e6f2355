"""Values that people write behind ``--set KEY=``."""

from __future__ import annotations

from typing import Any

import pytest

from rlmesh.rl.faults import value_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-6", 2e-6), ("3", 3), ("1_000", 1000), (".5", 0.5), ("-1", -1), ("true", True), ("True", True),
        ("null", None), ("None", None), ("False", False), ('"a"', "a"), ("a", "a"), ("", ""), ("a,b", "a,b"),
        ("64,64", [64, 64]), ("64, 64", [64, 64]), ("64,", [64]), ("(64, 64)", [64, 64]), ("(64,)", [64]),
        ("[64, 64,]", [64, 64]), ("[64, 64]", [64, 64]), ("['a', 'b']", ["a", "b"]),
        ("[(0, 1e-3), (1e6, 0)]", [[0, 1e-3], [1e6, 0]]),
        ("[[16, (8, 8), 4]]", [[16, [8, 8], 4]]), ("{'type': 'ReplayBuffer'}", {"type": "ReplayBuffer"}),
        ('{"a": [1]}', {"a": [1]}), ("(a, b)", "(a, b)"), ("[a]", "[a]"), ("1e-3,x", "1e-3,x"), ("007", "007"),
        ("__import__('os')", "__import__('os')"), ("(" * 500, "(" * 500), ("1.2.3", "1.2.3"),
        ("data/a.parquet", "data/a.parquet"),
    ],
)  # fmt: skip
def test_texts_and_their_values(text: str, value: Any) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)
